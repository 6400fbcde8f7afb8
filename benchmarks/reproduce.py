"""What the sources claim, in miniature: their arms on real data, and which of their orderings hold.

    python -m benchmarks.reproduce SOURCE --work DIR [--seeds N] [--size small|full] [--jobs N]
    python -m benchmarks.reproduce best --work DIR

Every step is a command as a user types it; --jobs students at a time are trained and scored, each
on one core. What is finished in --work is not made again; no arm is chosen by the test set, it only
scores. `best` compares our recipe with the best of each source; it finds finished work in
DIR/SOURCE.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from benchmarks import processes
from benchmarks.report import RESULTS, publish, table
from store.console import command_errors
from store.errors import UserError

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
    """What a finished model is scored by: the words of `downstream` beside --model and --out;
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


def command(module: str, *words: str | Path) -> None:
    """Run the `main` of a module in a process of its own.

    Raises CalledProcessError where it ends otherwise than well.
    """
    code = processes.finish(processes.fork(processes.command, module, *words), seconds=None)
    if code != 0:
        raise subprocess.CalledProcessError(code, [module, *map(str, words)])


def downstream(out: Path, *words: str | Path) -> dict[str, float]:
    """Run it where it has not run yet; its main measure on "test", and on each of several files
    by the first part of its name."""
    if not (out / "scores.json").exists():
        command("downstream.cli", *words, "--out", out)
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
        command("downstream.cli", "--task", "mlm", *words, "--out", out, *resume)
    return out


def dump(out: Path, *words: str | Path) -> Path:
    """The same for a store."""
    if not (out.with_suffix(".done")).exists():
        command("teacher_dump.cli", *words, "--out", out)
        out.with_suffix(".done").touch()
    return out


def reproduce(source: Source, work: Path, seeds: int, size: str, jobs: int = 1) -> Scores:
    """Train and score every arm with every seed, `jobs` at a time, and score the teacher.

    Raises UserError where `work` is of another size.
    """
    work.mkdir(parents=True, exist_ok=True)
    of_size = work / "size"
    if of_size.exists() and of_size.read_text() != size:
        raise UserError(f"{work}: holds work of --size {of_size.read_text()}; give another --work")
    of_size.write_text(size)
    stores, teacher = source.prepare(work, size)
    arms = {name: arm for name, arm in source.arms.items() if size in arm.sizes}
    pool = ThreadPoolExecutor(jobs)
    try:
        of_teacher = pool.submit(_scored, source, teacher, work / "scores-teacher", size, 0)
        found: dict[str, list[dict[str, float]]] = {}
        for later in (False, True):
            asked = {
                name: [
                    pool.submit(_student, source, name, work, size, stores, seed)
                    for seed in range(seeds)
                ]
                for name, arm in arms.items()
                if arm.needs_others == later
            }
            found |= {name: [each.result() for each in some] for name, some in asked.items()}
        found = {"teacher": [of_teacher.result()]} | {name: found[name] for name in arms}
    finally:
        pool.shutdown(cancel_futures=True)
    return {
        name: {measure: [each[measure] for each in some] for measure in some[0]}
        for name, some in found.items()
    }


def _student(
    source: Source, name: str, work: Path, size: str, stores: list[Path], seed: int
) -> dict[str, float]:
    """Train it with a seed, and score it."""
    out = work / f"{name}-{seed}".replace(" ", "-")
    if not (out / "model.safetensors").exists():
        command(
            "student_train.cli", *_words(source, source.arms[name], work, size, stores, seed, out)
        )
    found = _scored(source, out, work / f"scores-{out.name}", size, seed)
    told = ", ".join(f"{measure} {value:.4f}" for measure, value in found.items())
    print(f"{name}, seed {seed}: {told}", flush=True)
    return found


def _words(
    source: Source, arm: Arm, work: Path, size: str, stores: list[Path], seed: int, out: Path
) -> list[str]:
    learnt = [word for number in arm.stores for word in ("--store", str(stores[number]))]
    own = [word.replace("{work}", str(work)) for word in arm.words]
    resume = ["--resume"] if (out / "training.json").exists() else []
    return [*learnt, *source.words[size], *own, "--seed", str(seed), "--out", str(out), *resume]


def _scored(source: Source, model: Path, out: Path, size: str, seed: int) -> dict[str, float]:
    found = {}
    for task in source.tasks[size]:
        words = [
            word.replace("{work}", str(out.parent)).replace("{seed}", str(seed))
            for word in task.words
        ]
        folder = out.with_name(f"{out.name}-{task.measure}".replace(" ", "-"))
        for file, score in downstream(folder, *words, "--model", model).items():
            found[task.measure if file == "test" else file] = score
    return found


def report(source: Source, scores: Scores) -> str:
    """The table of all arms, and which orderings hold, in words."""
    from benchmarks.distillation_helps import mean_and_deviation

    measures = list(scores["teacher"])
    head = ["", "student-train", *measures, "of the teacher"]
    if source.published:
        head.append("published")
    rows, main = [], of_tasks(source, scores)
    for name, found in scores.items():
        words = " ".join(source.arms[name].words) if name in source.arms else ""
        cells = [mean_and_deviation(values) for values in found.values()]
        rows.append([name, words, *cells, _share(main[name], main["teacher"])])
        if source.published:
            rows[-1].append(source.published.get(name, ""))
    lines = [
        f"- {claim}: {_judged(main, better, worse)}"
        for better, worse, claim in source.orderings
        if {better, worse} <= scores.keys()
    ]
    if source.published:
        lines.insert(0, f"Published: {source.published_measure}.\n")
    return table(head, rows) + "\n\n" + "\n".join(lines)


def of_tasks(source: Source, scores: Scores) -> Scores:
    """Without the columns of single files."""
    measures = {task.measure for tasks in source.tasks.values() for task in tasks}
    return {
        name: {measure: values for measure, values in found.items() if measure in measures}
        for name, found in scores.items()
    }


def _share(found: Mapping[str, list[float]], teacher: Mapping[str, list[float]]) -> str:
    """How much of the teacher's figures is kept, mean over the measures."""
    if not all(value > 0 for (value,) in teacher.values()):
        return ""
    return f"{statistics.mean(statistics.mean(found[m]) / teacher[m][0] for m in teacher):.0%}"


def _judged(scores: Scores, better: str, worse: str) -> str:
    """For every measure whether an ordering holds; means closer than the larger deviation of the
    two decide nothing."""
    told = []
    for measure, ours in scores[better].items():
        theirs = scores[worse][measure]
        gap = statistics.mean(ours) - statistics.mean(theirs)
        spread = max(map(statistics.stdev, (ours, theirs))) if len(ours) > 1 else 0.0
        won = sum(a > b for a, b in zip(ours, theirs, strict=True))
        holds = "not decided" if abs(gap) <= spread else "holds" if gap > 0 else "does not hold"
        told.append(
            f"{holds} in {measure} ({better} {statistics.mean(ours):.3f}, {worse}"
            f" {statistics.mean(theirs):.3f}; better with {won} of {len(ours)} seeds)"
        )
    return "; ".join(told)


def compare_best(
    sources: Mapping[str, Source], work: Path, seeds: int, size: str, jobs: int = 1
) -> str:
    """Our recipe and the best of each source: same student, data and steps."""
    from benchmarks.distillation_helps import mean_and_deviation

    head = ("source", "its best", "measure", "its own", OURS, "student-train of ours")
    rows, lines = [], []
    for name, source in sources.items():
        arms = {arm: source.arms[arm] for arm in (source.best, OURS)}
        found = reproduce(replace(source, arms=arms), work / name, seeds, size, jobs)
        scores = of_tasks(source, found)
        words = " ".join(source.arms[OURS].words)
        for measure, values in scores[OURS].items():
            cells = [mean_and_deviation(each) for each in (scores[source.best][measure], values)]
            rows.append([name, source.best, measure, *cells, words])
        lines.append(f"- {name}, ours is better: {_judged(scores, OURS, source.best)}")
    return table(head, rows) + "\n\n" + "\n".join(lines)


@click.command()
@click.argument("name", metavar="SOURCE")
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--size", type=click.Choice(SIZES), default="small")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="students at a time")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(name: str, work: Path, seeds: int, size: str, jobs: int, results: Path) -> None:
    """Train and score the arms of a SOURCE: kolesnikova, mukherjee, tinymbert, zhao, slovakbert;
    best: our recipe against that of each."""
    from benchmarks.reproduce_sources import BEST, SOURCES

    if name not in (*SOURCES, "best"):
        raise click.BadParameter(f"there are {', '.join(SOURCES)}, best", param_hint="SOURCE")
    settings = f"`python -m benchmarks.reproduce {name} --seeds {seeds} --size {size}`; "
    if name == "best":
        body = compare_best(SOURCES, work, seeds, size, jobs)
        publish("Our recipe against those of the sources", settings + BEST, body, results)
        return
    source = SOURCES[name]
    body = report(source, reproduce(source, work, seeds, size, jobs))
    publish(source.title, settings + source.settings[size], body, results)


if __name__ == "__main__":
    main()
