"""The arms of a source, trained and scored by commands as a user types them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.reproduce.chance import chance
from benchmarks.reproduce.costs import (
    NOTHING,
    Cost,
    dump_cost,
    given,
    masked_lm_cost,
    size_of,
    student_cost,
    tokens_of,
)
from benchmarks.reproduce.source import (
    TEACHER,
    Arm,
    Prepared,
    Probe,
    Scores,
    Source,
    Task,
    Work,
)
from teachonce.student_train.output.report import read_report
from teachonce.support.errors import UserError
from teachonce.support.options import flag_of


def downstream(
    work: Work, out: Path, *words: str | Path, figure: str | None = None
) -> dict[str, float]:
    """Run `downstream` unless its output exists, and read the named figure, by default the task's
    main figure.

    The figure is returned for "test", and by the first part of its name for each of several files.
    A dry run reads none. Raises UserError if the task has no such figure.
    """
    scores = out / "scores.json"
    work.steps.run("teachonce.downstream.cli", *words, "--out", out, done=scores.exists)
    return {} if work.steps.dry else _read(scores, figure)


def key_of(figure: str, measures: Mapping[str, str]) -> str:
    """Return the key of a figure in the scores of a task with these `measures` (name to key).

    Raises UserError for a name that the task lacks.
    """
    if figure not in measures:
        raise UserError(f"figure {figure!r}: the task's figures are {', '.join(measures)}")
    return measures[figure]


def _read(path: Path, figure: str | None) -> dict[str, float]:
    saved = json.loads(path.read_text())
    key = key_of(figure, saved["measures"]) if figure else saved["primary"]
    scores = {
        split: float(figures[key])
        for split, figures in saved["mean"].items()
        if split.startswith("test")
    }
    names = {split: Path(saved["files"][split]).name for split in scores.keys() & saved["files"]}
    if len(names) < 2:
        return scores
    of_files = {names[split].split(".")[0]: scores[split] for split in scores if split in names}
    return {**of_files, "test": scores["test"]}


def trained_teacher(work: Work, out: Path, *words: str | Path, like: Path | None = None) -> Path:
    """Train a masked LM by `downstream --task mlm`; a stopped training is resumed.

    like: a text for a dry run's estimate of epochs, if an earlier step writes the real text.
    """
    resume = ["--resume"] if (out / "settings.json").exists() else []
    words = ("--task", "mlm", *words, "--out", out, *resume)
    work.steps.run(
        "teachonce.downstream.cli",
        *words,
        done=(out / "metrics.json").exists,
        cost=lambda: masked_lm_cost([str(word) for word in words], like),
    )
    return out


def dump(
    work: Work, out: Path, text: Path, *words: str | Path, like: tuple[Path, str] | None = None
) -> Path:
    """Dump a store of a text unless it is sealed; a stopped dump is resumed.

    like: a text and a model for a dry run's estimate, if earlier steps make the real ones.
    """
    sealed = out.with_suffix(".done")
    words = (*words, "--corpus", text, "--out", out)

    def cost() -> Cost:
        if not work.estimated:
            return NOTHING
        arguments = [str(word) for word in words]
        path, model = like or (text, work.teacher)
        return dump_cost(arguments, tokens_of(path, model), size_of(model))

    work.steps.run("teachonce.teacher_dump.cli", *words, done=sealed.exists, cost=cost)
    work.steps.write(sealed.touch)
    return out


LENGTHS = ("epochs", "steps", "accumulate", "batch_texts")


def shortened(words: Sequence[str], work: Work) -> list[str]:
    """Return words of `student-train` that multiply its lengths, batches and vocabularies by the
    scale, including those of a recipe and of its stages."""
    from teachonce.student_train.cli import main as student_train
    from teachonce.student_train.settings.options import ruled_out
    from teachonce.student_train.settings.recipe import find_recipe

    options = given(student_train, ["--store", "none", *words])
    recipe = find_recipe(options["recipe"]) if "recipe" in options else None
    tables = [options, *((recipe.options, *recipe.stages) if recipe else ())]
    arguments, excluded = list[str](), ruled_out(options.keys())

    def first(name: str) -> Any:
        return next((table[name] for table in tables if table.get(name) is not None), None)

    for name in LENGTHS:
        if (length := first(name)) and name not in excluded:
            value = float(length) * work.scale
            number = f"{value:g}" if name == "epochs" else str(max(1, round(value)))
            arguments += [flag_of(name), number]
    for name in ("vocab", "prune_to"):
        if vocab := first(name):
            arguments += [flag_of(name), work.pieces(vocab)]
    return arguments


@dataclass(frozen=True)
class Reproduction:
    """Trains and scores the arms of a source in a folder, with all seeds below `seeds`."""

    source: Source
    work: Work
    seeds: int

    def scores(self) -> Scores:
        """Train and score every arm, and score the teacher. A dry run gives no scores.

        Raises UserError if the folder contains work with other settings.
        """
        started = time.monotonic()
        before = self.minutes()
        self._begin()
        try:
            by_arm = self._each_arm(self.source.prepare(self.work), self.work.folder)
        finally:
            self._took(before, started)
        return _by_measure(by_arm)

    def probed(self, names: Sequence[str], probe: Probe) -> Scores:
        """Train and score some arms again with the words of a probe, in a separate folder."""
        started, before = time.monotonic(), self.minutes()
        words = shlex.join(probe.words)
        arms = {
            name: replace(arm, words=(*arm.words, *probe.words))
            for name, arm in self.source.arms.items()
            if name in names
        }
        again = replace(self, source=replace(self.source, arms=arms, models={}, joined={}))
        folder = self.work.folder / f"probe{words}".replace(" ", "-").replace("/", "-")
        try:
            by_arm = again._each_arm(self.source.prepare(self.work), folder, teacher=False)
        finally:
            self._took(before, started)
        return _by_measure(by_arm)

    def chances(self) -> dict[str, float]:
        """Return the score without training for each task; see `chance`."""
        return {
            task.measure: chance([self._filled(word, 0) for word in task.words], task.figure)
            for task in self.source.tasks
        }

    def settings(self) -> str:
        """Describe the settings that all arms share."""
        lines = [self.source.about, shlex.join(self.source.words)]
        lines += [name for name in (self.work.teacher, self.work.larger) if name]
        lines += [f"scale {self.work.scale:g}"] if self.work.scale < 1 else []
        return "".join(f"{line}\n" for line in lines)

    def minutes(self) -> float:
        """Return the minutes spent so far."""
        file = self.work.folder / "minutes"
        return float(file.read_text()) if file.exists() else 0.0

    def _begin(self) -> None:
        if self.work.steps.dry:
            return
        self.work.folder.mkdir(parents=True, exist_ok=True)
        started_with = self.work.folder / "settings.txt"
        if started_with.exists() and started_with.read_text() != self.settings():
            raise UserError(
                f"{self.work.folder}: holds work of other settings ({started_with.name});"
                " give another --work"
            )
        started_with.write_text(self.settings())

    def _took(self, before: float, started: float) -> None:
        if not self.work.steps.dry:
            took = before + (time.monotonic() - started) / 60
            (self.work.folder / "minutes").write_text(f"{took:.2f}")

    def _each_arm(
        self, prepared: Prepared, folder: Path, teacher: bool = True
    ) -> dict[str, list[dict[str, float]]]:
        arms = self.source.arms
        pool = ThreadPoolExecutor(self.work.steps.jobs)
        try:
            by_arm: dict[str, list[dict[str, float]]] = {}
            if teacher:
                out = folder / "scores-teacher"
                by_arm[TEACHER] = [pool.submit(self._scored, prepared.teacher, out, 0).result()]
                by_arm |= self._other_models(folder, pool)
            for later in (False, True):
                futures = {
                    name: [
                        pool.submit(self._student, name, arm, prepared, seed, folder)
                        for seed in range(self.seeds)
                    ]
                    for name, arm in arms.items()
                    if arm.needs_others == later
                }
                by_arm |= {name: [f.result() for f in runs] for name, runs in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)
        if self.work.steps.dry:
            return {}
        parts = {part for row in self.source.joined.values() for part in row.values()}
        order = [TEACHER, *self.source.joined, *self.source.models, *arms]
        rows = self._joined(by_arm) | by_arm
        return {name: rows[name] for name in order if name in rows and name not in parts}

    def _other_models(self, folder: Path, pool: Executor) -> dict[str, list[dict[str, float]]]:
        """Score the models that are not trained from a store, once each."""
        futures = {
            name: pool.submit(
                self._scored,
                self._filled(model.path, 0) or self.work.teacher,
                folder / f"scores-{name}".replace(" ", "-"),
                0,
                model.tasks,
            )
            for name, model in self.source.models.items()
        }
        return {name: [future.result()] for name, future in futures.items()}

    def _joined(
        self, by_arm: Mapping[str, Sequence[Mapping[str, float]]]
    ) -> dict[str, list[dict[str, float]]]:
        rows = {}
        for name, parts in self.source.joined.items():
            (task,) = self.source.tasks
            files = [
                {file: by_arm[part][seed][file] for file, part in parts.items()}
                for seed in range(min(len(by_arm[part]) for part in parts.values()))
            ]
            rows[name] = [scores | {task.measure: mean(scores.values())} for scores in files]
        return rows

    def _student(
        self, name: str, arm: Arm, prepared: Prepared, seed: int, folder: Path
    ) -> dict[str, float]:
        """Train a student with a seed, and score it."""
        out = self._folder(name, seed, folder)
        arguments = [
            self._filled(word, seed).replace("{teacher}", str(prepared.teacher))
            for word in (*self.source.words, *arm.words)
        ]
        arguments += shortened(arguments, self.work) if self.work.scale < 1 else []
        text = prepared.texts[arm.stores[0] if arm.stores else 0]
        store_paths = [prepared.stores[number] for number in arm.stores]
        store_paths += [
            dump(self.work, student.with_suffix(".zarr"), text, "--model", student,
                 *self.source.student_dump)
            for student in (self._folder(other, seed, folder) for other in arm.students)
        ]  # fmt: skip
        stores = [word for store in store_paths for word in ("--store", str(store))]
        resume = ["--resume"] if (out / "training.json").exists() else []

        def cost() -> Cost:
            if not self.work.estimated:
                return NOTHING
            teacher = self.work.teacher
            return student_cost(arguments, tokens_of(text, teacher), size_of(teacher))

        self.work.steps.run(
            "teachonce.student_train.cli",
            *(*stores, *arguments, "--seed", str(seed), "--out", str(out), *resume),
            done=lambda: "result" in (read_report(out) or {}),
            cost=cost,
        )
        scores = self._scored(out, folder / f"scores-{out.name}", seed)
        if scores:
            printed = ", ".join(f"{measure} {value:.4f}" for measure, value in scores.items())
            print(f"{name}, seed {seed}: {printed}", flush=True)
        return scores

    def _folder(self, name: str, seed: int, folder: Path) -> Path:
        return folder / f"{name}-{seed}".replace(" ", "-")

    def _scored(
        self, model: str | Path, out: Path, seed: int, tasks: Sequence[Task] = ()
    ) -> dict[str, float]:
        by_measure, folders = {}, dict[tuple[str, ...], Path]()
        for task in tasks or self.source.tasks:
            words = [self._filled(word, seed) for word in task.words]
            folder = out.with_name(f"{out.name}-{task.measure}".replace(" ", "-"))
            folder = folders.setdefault(task.words, folder)  # two figures of one task: one run
            scores = downstream(self.work, folder, *words, "--model", model, figure=task.figure)
            for file, score in scores.items():
                by_measure[task.measure if file == "test" else file] = score
        return by_measure

    def _filled(self, word: str, seed: int) -> str:
        values = {"{work}": self.work.folder, "{data}": self.work.data, "{seed}": seed}
        for field, value in values.items():
            word = word.replace(field, str(value))
        return word


def _by_measure(by_arm: Mapping[str, Sequence[Mapping[str, float]]]) -> Scores:
    return {
        name: {measure: [scores[measure] for scores in runs] for measure in runs[0]}
        for name, runs in by_arm.items()
    }
