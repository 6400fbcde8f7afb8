"""Which of a paper's orderings hold among its arms, and how our recipe compares, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.common.results import mean_and_deviation, table
from benchmarks.reproduce.arms import OURS, Reproduction, Scores, Source


def ordering_table(source: Source, scores: Scores) -> str:
    """The table of all arms, and which orderings hold, in words."""
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
