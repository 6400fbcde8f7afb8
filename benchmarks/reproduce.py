"""What the sources claim, in miniature: their arms on real data, and which of their orderings hold.

    python -m benchmarks.reproduce SOURCE --work DIR [--seeds N] [--size small|full]

Every step is a command as a user types it. What is finished in --work is not made again; no arm is
chosen by the test set, it only scores.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.main_job import command
from benchmarks.report import RESULTS, publish, table
from store.console import command_errors


@dataclass(frozen=True)
class Arm:
    """A student: the words of `student-train` beside store, seed and size, and which of the stores
    it learns from; {work} in a word is the folder of all of them."""

    words: tuple[str, ...]
    store: int = 0


@dataclass(frozen=True)
class Source:
    """A paper in miniature.

    prepare: makes the stores and what else is needed in a folder; returns the stores and the score
    of the teacher on the same test set.
    score: of a finished student's folder, in another folder.
    orderings: (better, worse, what the paper says).
    """

    title: str
    measure: str
    settings: Mapping[str, str]
    arms: Mapping[str, Arm]
    orderings: Sequence[tuple[str, str, str]]
    prepare: Callable[[Path, str], tuple[list[Path], float]]
    score: Callable[[Path, Path], float]
    words: Callable[[str], tuple[str, ...]]


def primary(scores: Path, split: str = "test") -> float:
    """The main measure of a finished `downstream` run."""
    report = json.loads((scores / "scores.json").read_text())
    return float(report["mean"][split][report["primary"]])


def downstream(out: Path, *words: str | Path) -> float:
    """Run it where it has not run yet; its main measure on the test set."""
    if not (out / "scores.json").exists():
        command("downstream.cli", *words, "--out", out)
    return primary(out)


def dump(out: Path, *words: str | Path) -> Path:
    """The same for a store; one that was stopped goes on."""
    if not (out.with_suffix(".done")).exists():
        command("teacher_dump.cli", *words, "--out", out)
        out.with_suffix(".done").touch()
    return out


def reproduce(source: Source, work: Path, seeds: int, size: str) -> str:
    """Train and score every arm with every seed; the table, and what holds, in words."""
    work.mkdir(parents=True, exist_ok=True)
    stores, teacher = source.prepare(work, size)
    scores: dict[str, list[float]] = {}
    for name, arm in source.arms.items():
        for seed in range(seeds):
            out = work / f"{name}-{seed}".replace(" ", "-")
            if not (out / "model.safetensors").exists():
                resume = ["--resume"] if (out / "training.json").exists() else []
                own = [word.replace("{work}", str(work)) for word in arm.words]
                words = (*source.words(size), *own, "--seed", str(seed), *resume)
                command("student_train.cli", "--store", stores[arm.store], "--out", out, *words)
            score = source.score(out, work / f"scores-{out.name}")
            scores.setdefault(name, []).append(score)
            print(f"{name}, seed {seed}: {score:.4f}", flush=True)
    means = {name: statistics.mean(values) for name, values in scores.items()}
    rows: list[list[object]] = [["teacher", "", teacher, ""]]
    for name, values in scores.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append([name, " ".join(source.arms[name].words), means[name], spread])
    head = ("", "student-train", source.measure, "deviation")
    told = "\n".join(f"- {_judged(means, scores, *each)}" for each in source.orderings)
    return f"{table(head, rows)}\n\n{told}"


def _judged(
    means: Mapping[str, float],
    scores: Mapping[str, list[float]],
    better: str,
    worse: str,
    claim: str,
) -> str:
    won = sum(a > b for a, b in zip(scores[better], scores[worse], strict=True))
    holds = "holds" if means[better] > means[worse] else "does not hold"
    return (
        f"{claim}: {holds} ({better} {means[better]:.3f}, {worse} {means[worse]:.3f}; better with"
        f" {won} of {len(scores[better])} seeds)"
    )


@click.command()
@click.argument("name", metavar="SOURCE")
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", default=3)
@click.option("--size", type=click.Choice(["small", "full"]), default="small")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(name: str, work: Path, seeds: int, size: str, results: Path) -> None:
    """Train and score the arms of a SOURCE: mukherjee or tinymbert."""
    from benchmarks.reproduce_sources import SOURCES

    if name not in SOURCES:
        raise click.BadParameter(f"there are {', '.join(SOURCES)}", param_hint="SOURCE")
    source = SOURCES[name]
    body = reproduce(source, work, seeds, size)
    settings = f"`python -m benchmarks.reproduce {name} --seeds {seeds} --size {size}`; "
    publish(source.title, settings + source.settings[size], body, results)


if __name__ == "__main__":
    main()
