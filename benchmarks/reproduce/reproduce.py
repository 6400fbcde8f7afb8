"""What the sources claim, in miniature: their arms on real data, and which of their orderings hold.

    python -m benchmarks.reproduce SOURCE --work DIR [--seeds N] [--size small|full] [--jobs N]
    python -m benchmarks.reproduce best|all --work DIR

Every step is a command as a user types it; --jobs students at a time are trained and scored, and
share the cores. What is finished in --work is not made again; no arm is chosen by the test set, it
only scores. `best` compares our recipe with the best of each source; it finds finished work in
DIR/SOURCE. `all` is every task of every paper once in DIR/SOURCE, and then `best`. A section that
is written again loses what was written below it by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.common.results import RESULTS, publish, table
from benchmarks.reproduce.arms import OURS, SIZES, Reproduction, Scores, Source
from support.console import command_errors


def report(source: Source, scores: Scores) -> str:
    """The table of all arms, and which orderings hold, in words."""
    from benchmarks.quality.distillation_helps import mean_and_deviation

    measures = list(scores["teacher"])
    head = ["", "student-train", *measures, "of the teacher"]
    if source.published:
        head.append("published")
    rows, main = [], of_tasks(source, scores)
    for name, found in scores.items():
        (*parts,) = source.joined.get(name, {name: name}).values()
        words = " ".join(source.arms[parts[0]].words) if parts[0] in source.arms else ""
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
    from benchmarks.quality.distillation_helps import mean_and_deviation

    head = ("source", "its best", "measure", "its own", OURS, "student-train of ours")
    rows, lines, minutes = [], [], 0.0
    for name, source in sources.items():
        arms = {arm: source.arms[arm] for arm in (source.best, OURS)}
        runs = Reproduction(replace(source, arms=arms), work / name, seeds, size, jobs)
        scores = of_tasks(source, runs.scores())
        minutes += runs.minutes()
        words = " ".join(source.arms[OURS].words)
        for measure, values in scores[OURS].items():
            cells = [mean_and_deviation(each) for each in (scores[source.best][measure], values)]
            rows.append([name, source.best, measure, *cells, words])
        lines.append(f"- {name}, ours is better: {_judged(scores, OURS, source.best)}")
    lines.append(f"\nAll arms of these sources took {minutes:.0f} minutes with --jobs {jobs}.")
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
    """Train and score the arms of a SOURCE: kolesnikova, mukherjee (also mukherjee-snips
    and mukherjee-500), tinymbert, zhao, slovakbert; best: our recipe against that of each; all:
    these but mukherjee-500, and best."""
    from benchmarks.reproduce.sources import ALL, BEST, SOURCES

    if name not in (*SOURCES, "best", "all"):
        raise click.BadParameter(f"there are {', '.join(SOURCES)}, best, all", param_hint="SOURCE")
    folders = {each: work / each for each in ALL if name == "all"}
    if name in SOURCES:
        folders = {name: work}
    how = f"--seeds {seeds} --size {size}"
    for each, folder in folders.items():
        source = SOURCES[each]
        arms = Reproduction(source, folder, seeds, size, jobs)
        body = report(source, arms.scores())
        took = f"All of it took {arms.minutes():.0f} minutes with --jobs {jobs}."
        said = f"`python -m benchmarks.reproduce {each} {how}`; {source.settings[size]} {took}"
        publish(source.title, said, body, results)
    if name not in SOURCES:
        body = compare_best(ALL, work, seeds, size, jobs)
        said = f"`python -m benchmarks.reproduce best {how}`; {BEST}"
        publish("Our recipe against those of the sources", said, body, results)
