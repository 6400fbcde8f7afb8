"""The arms of a paper: the commands that train and score them, each in its own process."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmarks.common.processes import in_own_process
from student_train.output.report import read_report
from support.errors import UserError

SIZES = ("small", "full")
OURS = "ours"
Scores = dict[str, dict[str, list[float]]]  # of an arm, by measure, for every seed


@dataclass(frozen=True)
class Arm:
    """A student: the words of `student-train` beside seed and size, which of the stores it learns
    from, and the sizes that it is a part of; {work} in a word is the folder of all arms."""

    words: tuple[str, ...]
    stores: tuple[int, ...] = (0,)
    sizes: tuple[str, ...] = SIZES

    @property
    def needs_others(self) -> bool:
        return any("{work}" in word for word in self.words)


@dataclass(frozen=True)
class Task:
    """A task to score a model by: the words of `downstream` beside --model and --out;
    {work} in a word is the folder of all arms, {seed} that of the arm. Several files to test have
    a column each beside the measure, which is their mean."""

    measure: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A paper in miniature. Of each size: settings, words of `student-train` for all arms, tasks.

    prepare: makes the stores, and what the tasks need, in a folder; returns the stores and the
        teacher's folder.
    orderings: (better, worse, what the paper says).
    best: the paper's own best arm, which `OURS` is compared with.
    published: the paper's own figures of some arms, and of "teacher"; what they measure, and where
        they stand.
    joined: a row of several arms, which do not have one each: by test file the arm that it is of.
    """

    title: str
    settings: Mapping[str, str]
    words: Mapping[str, tuple[str, ...]]
    tasks: Mapping[str, Sequence[Task]]
    arms: Mapping[str, Arm]
    orderings: Sequence[tuple[str, str, str]]
    best: str
    prepare: Callable[[Path, str], tuple[list[Path], Path]]
    published: Mapping[str, str] = field(default_factory=dict)
    published_measure: str = ""
    joined: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def downstream(out: Path, *words: str | Path, jobs: int = 1) -> dict[str, float]:
    """Run `downstream`, unless that is done already, and read its main measure.

    The measure is given on "test", and by the first part of its name on each of several files.
    """
    if not (out / "scores.json").exists():
        in_own_process("downstream.cli", *words, "--out", out, jobs=jobs)
    found = json.loads((out / "scores.json").read_text())
    scores = {
        split: float(figures[found["primary"]])
        for split, figures in found["mean"].items()
        if split.startswith("test")
    }
    names = {split: Path(found["files"][split]).name for split in scores.keys() & found["files"]}
    if len(names) < 2:
        return scores
    of_files = {names[split].split(".")[0]: scores[split] for split in scores if split in names}
    return {**of_files, "test": scores["test"]}


def trained_teacher(out: Path, *words: str | Path) -> Path:
    """A masked LM by `downstream --task mlm`; one that was stopped goes on."""
    if not (out / "metrics.json").exists():
        resume = ["--resume"] if (out / "settings.json").exists() else []
        in_own_process("downstream.cli", "--task", "mlm", *words, "--out", out, *resume)
    return out


def dump(out: Path, *words: str | Path) -> Path:
    """Dump a store, unless that is done already."""
    if not (out.with_suffix(".done")).exists():
        in_own_process("teacher_dump.cli", *words, "--out", out)
        out.with_suffix(".done").touch()
    return out


@dataclass(frozen=True)
class Reproduction:
    """The arms of a source in a folder, trained and scored with seeds below `seeds`, `jobs` at a
    time."""

    source: Source
    work: Path
    seeds: int
    size: str
    jobs: int = 1

    def scores(self) -> Scores:
        """Train and score every arm, and score the teacher.

        Raises UserError where `work` is of another size or other settings.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        begun_with, now = self.work / "settings.txt", self.settings()
        if begun_with.exists() and begun_with.read_text() != now:
            raise UserError(
                f"{self.work}: holds work of other settings, told in {begun_with.name};"
                " give another --work"
            )
        begun_with.write_text(now)
        begun, before = time.monotonic(), self.minutes()
        try:
            found = self._each_arm(*self.source.prepare(self.work, self.size))
        finally:
            took = before + (time.monotonic() - begun) / 60
            (self.work / "minutes").write_text(f"{took:.2f}")
        return {
            name: {measure: [each[measure] for each in some] for measure in some[0]}
            for name, some in found.items()
        }

    def settings(self) -> str:
        """The settings that all arms share, in words."""
        words = shlex.join(self.source.words[self.size])
        return f"--size {self.size}; {self.source.settings[self.size]}\n{words}\n"

    def minutes(self) -> float:
        """Minutes that all of it took so far."""
        file = self.work / "minutes"
        return float(file.read_text()) if file.exists() else 0.0

    def _each_arm(self, stores: list[Path], teacher: Path) -> dict[str, list[dict[str, float]]]:
        arms = {name: arm for name, arm in self.source.arms.items() if self.size in arm.sizes}
        pool = ThreadPoolExecutor(self.jobs)
        try:
            of_teacher = pool.submit(self._scored, teacher, self.work / "scores-teacher", 0)
            found: dict[str, list[dict[str, float]]] = {}
            for later in (False, True):
                asked = {
                    name: [
                        pool.submit(self._student, name, stores, seed) for seed in range(self.seeds)
                    ]
                    for name, arm in arms.items()
                    if arm.needs_others == later
                }
                found |= {name: [each.result() for each in some] for name, some in asked.items()}
            rows = self._joined(found) | {name: found[name] for name in arms}
            parts = {part for each in self.source.joined.values() for part in each.values()}
            return {"teacher": [of_teacher.result()]} | {
                name: row for name, row in rows.items() if name not in parts
            }
        finally:
            pool.shutdown(cancel_futures=True)

    def _joined(
        self, found: Mapping[str, Sequence[Mapping[str, float]]]
    ) -> dict[str, list[dict[str, float]]]:
        rows = {}
        for name, parts in self.source.joined.items():
            if found.keys() >= set(parts.values()):
                (task,) = self.source.tasks[self.size]
                files = [
                    {file: found[part][seed][file] for file, part in parts.items()}
                    for seed in range(self.seeds)
                ]
                rows[name] = [each | {task.measure: mean(each.values())} for each in files]
        return rows

    def _student(self, name: str, stores: list[Path], seed: int) -> dict[str, float]:
        """Train it with a seed, and score it."""
        out = self.work / f"{name}-{seed}".replace(" ", "-")
        if "result" not in (read_report(out) or {}):
            in_own_process(
                "student_train.cli", *self._words(name, stores, seed, out), jobs=self.jobs
            )
        found = self._scored(out, self.work / f"scores-{out.name}", seed)
        told = ", ".join(f"{measure} {value:.4f}" for measure, value in found.items())
        print(f"{name}, seed {seed}: {told}", flush=True)
        return found

    def _words(self, name: str, stores: list[Path], seed: int, out: Path) -> list[str]:
        arm = self.source.arms[name]
        learnt = [word for number in arm.stores for word in ("--store", str(stores[number]))]
        own = [word.replace("{work}", str(self.work)) for word in arm.words]
        resume = ["--resume"] if (out / "training.json").exists() else []
        words = [*learnt, *self.source.words[self.size], *own]
        return [*words, "--seed", str(seed), "--out", str(out), *resume]

    def _scored(self, model: Path, out: Path, seed: int) -> dict[str, float]:
        found = {}
        for task in self.source.tasks[self.size]:
            words = [
                word.replace("{work}", str(self.work)).replace("{seed}", str(seed))
                for word in task.words
            ]
            folder = out.with_name(f"{out.name}-{task.measure}".replace(" ", "-"))
            scores = downstream(folder, *words, "--model", model, jobs=self.jobs)
            for file, score in scores.items():
                found[task.measure if file == "test" else file] = score
        return found
