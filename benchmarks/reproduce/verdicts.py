"""Which of a paper's claims hold among its arms, and how our recipe compares, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.common.results import mean_and_deviation, table
from benchmarks.reproduce.reproduction import Reproduction
from benchmarks.reproduce.source import OURS, TEACHER, Claim, Published, Scores, Source

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
UNJUDGED = "not judged: no such task here"
CLAIMS = ("the claim", "where", "measure", "here", "figures", "seeds")
Probed = Callable[[Claim], Scores]


def report(source: Source, scores: Scores, probed: Probed) -> str:
    """Tell the figures of all arms beside the published ones, and which claims hold."""
    told = [arms_table(source, scores)]
    if source.published:
        told.append(_published(source.published))
    told.append(claims_table(source, scores, probed))
    return "\n\n".join(told)


def arms_table(source: Source, scores: Scores) -> str:
    """Tell the figures of all arms, and how much of the teacher's each keeps."""
    main = of_tasks(source, scores)
    rows = []
    for name, found in scores.items():
        (first, *_) = source.joined.get(name, {name: name}).values()
        words = " ".join(source.arms[first].words) if first in source.arms else ""
        cells = [mean_and_deviation(values) for values in found.values()]
        rows.append([name, words, *cells, _share(main[name], main[TEACHER])])
    return table(["", "student-train", *scores[TEACHER], "of the teacher"], rows)


def claims_table(source: Source, scores: Scores, probed: Probed) -> str:
    """Judge each claim by each measure that it is about; where it does not hold, judge it again
    after its probe."""
    main, rows = of_tasks(source, scores), []
    for claim in source.claims:
        judged = [(measure, *verdict(claim, main, measure)) for measure in measures(claim, main)]
        judged = judged or [(", ".join(claim.measures), UNJUDGED, "", "")]
        rows += [[claim.says, claim.where, *cells] for cells in judged]
        if claim.probe and any(found == FAILS for _, found, *_ in judged):
            again = main | of_tasks(source, probed(claim))  # a teacher is not trained again
            for measure in measures(claim, again):
                about = f"the same, {claim.probe.about}"
                rows.append([about, "", measure, *verdict(claim, again, measure)])
    return table(CLAIMS, rows)


def measures(claim: Claim, scores: Scores) -> list[str]:
    """List the measures that a claim is about."""
    return [name for name in scores[claim.better] if name in (claim.measures or (name,))]


def verdict(claim: Claim, scores: Scores, measure: str) -> tuple[str, str, str]:
    """Tell whether a claim holds by a measure, the two means, and with how many seeds `better` is
    ahead. Means closer than the larger deviation of the two decide nothing."""
    ours, theirs = scores[claim.better][measure], scores[claim.worse][measure]
    seeds = max(len(ours), len(theirs))  # the teacher is scored once
    ours, theirs = (each * (seeds // len(each)) for each in (ours, theirs))
    gap = statistics.mean(ours) - statistics.mean(theirs)
    spread = max(map(statistics.stdev, (ours, theirs))) if len(ours) > 1 else 0.0
    ahead = gap > spread
    if claim.gains:
        found = HOLDS if ahead else FAILS if gap < -spread else UNDECIDED
    else:
        found = FAILS if ahead else HOLDS if gap <= 0 else UNDECIDED
    figures = (
        f"{claim.better} {statistics.mean(ours):.3f}, {claim.worse} {statistics.mean(theirs):.3f}"
    )
    won = sum(one > other for one, other in zip(ours, theirs, strict=True))
    return found, figures, f"{won} of {len(ours)}"


def of_tasks(source: Source, scores: Scores) -> Scores:
    """Leave out the columns of single files."""
    kept = {task.measure for task in source.tasks}
    return {
        name: {measure: values for measure, values in found.items() if measure in kept}
        for name, found in scores.items()
    }


def _published(published: Published) -> str:
    rows = [[name, *cells] for name, cells in published.rows.items()]
    return f"Published ({published.where}):\n\n" + table(["", *published.columns], rows)


def _share(found: Mapping[str, list[float]], teacher: Mapping[str, list[float]]) -> str:
    """Tell how much of the teacher's figures is kept, mean over the measures."""
    if not all(value > 0 for (value,) in teacher.values()):
        return ""
    return f"{statistics.mean(statistics.mean(found[m]) / teacher[m][0] for m in teacher):.0%}"


def compare_best(runs: Mapping[str, Reproduction]) -> str:
    """Compare our recipe with the best of each source: same student, data and steps."""
    head = ("source", "its best", "measure", "its own", OURS, "ours is ahead", "seeds", "ours")
    rows, minutes = [], 0.0
    for name, run in runs.items():
        source = run.source
        arms = {arm: source.arms[arm] for arm in (source.best, OURS)}
        run = replace(run, source=replace(source, arms=arms, joined={}))
        scores = of_tasks(source, run.scores())
        minutes += run.minutes()
        words = " ".join(source.arms[OURS].words)
        claim = Claim("", "", OURS, source.best)
        for measure, values in scores[OURS].items():
            found, _, won = verdict(claim, scores, measure)
            cells = [mean_and_deviation(each) for each in (scores[source.best][measure], values)]
            rows.append([name, source.best, measure, *cells, found, won, words])
    return table(head, rows) + f"\n\nAll arms of these sources took {minutes:.0f} minutes."
