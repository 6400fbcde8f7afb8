"""Which of a paper's claims hold among its arms, and how our recipe compares, as tables."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.results import mean_and_deviation, table
from benchmarks.reproduce.chance import is_trained
from benchmarks.reproduce.reproduction import Reproduction
from benchmarks.reproduce.source import OURS, TEACHER, Claim, Published, Scores, Source

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
UNTRAINED = "not trained"
CHANCE = "chance"
SPREAD = "deviation"
"""A published column that is not a figure to compare."""
OF_ARMS = "in the table of arms"
CLAIMS = (
    "claim",
    "where in the paper",
    "verdict here",
    "figures here, seeds in which the first arm is ahead",
    "published",
)
Probed = Callable[[Claim], Scores]
Chances = Mapping[str, float]  # by measure, the score without training


@dataclass(frozen=True)
class Judged:
    """Holds the verdict on a claim by one measure, over the seeds of two arms."""

    measure: str
    found: str
    figures: str


def report(source: Source, scores: Scores, chances: Chances, probed: Probed) -> str:
    """Format the figures of all arms, with the published ones in the same row, and the verdicts on
    the claims."""
    paragraphs = [arms_table(source, scores, chances)]
    if shared := _shared(source):
        paragraphs.append(f"All arms: `{' '.join(shared)}`.")
    paragraphs.append(f"Published: {source.published.where}.")
    return "\n\n".join([*paragraphs, claims_table(source, scores, chances, probed)])


def arms_table(source: Source, scores: Scores, chances: Chances) -> str:
    """Format the figures of all arms, their share of the teacher's, and the published ones. Of
    several test files it reports the mean and the deviation between them."""
    main, shared, rows = of_tasks(source, scores), _shared(source), []
    published = source.published
    blank = [""] * len(published.columns)
    for name, arm_scores in scores.items():
        (arm, *_) = source.joined.get(name, {name: name}).values()
        options = _words(source, arm) if arm in source.arms else {}
        unique = [word for pair in options.items() if " ".join(pair) not in shared for word in pair]
        cells = [mean_and_deviation(values) for values in main[name].values()]
        cells += _over_files(arm_scores, main[name])
        cells.append(_share(main[name], main[TEACHER]))
        rows.append([name, " ".join(unique), *cells, *published.rows.get(name, blank)])
    floor = [f"{chances[measure]:.3f}" if measure in chances else "" for measure in main[TEACHER]]
    deviations = _over_files(scores[TEACHER], main[TEACHER])
    rows.append([CHANCE, "", *floor, *([""] * len(deviations)), "", *blank])
    head = ["", "student-train", *main[TEACHER], *(["deviation over files"] * len(deviations))]
    head.append("share of the teacher's score")
    return table([*head, *(f"published: {column}" for column in published.columns)], rows)


def claims_table(source: Source, scores: Scores, chances: Chances, probed: Probed) -> str:
    """Judge each claim, in one row; if it does not hold, judge it again after its probe.

    Neighbouring claims with the same verdict share one row if their words up to a colon are the
    same. Such a row refers to the table of arms for the published figures. Claims for which there
    is no arm or no task are listed below the table.
    """
    main, rows, others = of_tasks(source, scores), list[list[str]](), list[str]()
    for claim in source.claims:
        judged = judge(claim, main, chances)
        if not judged:
            others.append(claim.says)
            continue
        row = [claim.says, claim.where, *_cells(judged), _published(claim, source.published)]
        if rows and _about(rows[-1]) == _about(row):
            rows[-1] = _joined(rows[-1], row)
            if row[-1] and not claim.rows:
                rows[-1][-1] = OF_ARMS
        else:
            rows.append(row)
        if claim.probe and any(judgement.found == FAILS for judgement in judged):
            again = main | of_tasks(source, probed(claim))  # a teacher is not trained again
            about = f"the same, {claim.probe.about}"
            rows.append([about, "", *_cells(judge(claim, again, chances)), ""])
    below = f"\n\nNo arm or no data here: {'; '.join(dict.fromkeys(others))}." if others else ""
    return table(CLAIMS, rows) + below


def _about(row: Sequence[str]) -> list[str]:
    """Return a claim's words up to a colon, its place and its verdict."""
    says, where, outcome, *_ = row
    return [says.rpartition(": ")[0] or says, where, outcome]


def _joined(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Join the rows of two claims about the same. Figures that both begin with are written once."""
    _, _, end = second[0].rpartition(": ")
    says = first[0] if first[0] == second[0] else f"{first[0]}; {end}"
    common = os.path.commonprefix([first[3], second[3]]).rpartition(", ")[0]
    figures = f"{first[3]}; {second[3][len(common) :].removeprefix(', ')}"
    published = "; ".join(filter(None, (first[4], second[4])))
    return [says, *first[1:3], figures, published]


def judge(claim: Claim, scores: Scores, chances: Chances) -> list[Judged]:
    """Judge a claim by each of its measures, or by their mean if the paper claims the average.
    Return nothing if no such arm or task exists here.

    An average is not judged if an arm is not trained by one of its measures.
    """
    if not {claim.better, claim.worse} <= scores.keys():
        return []
    names = [name for name in scores[claim.better] if name in (claim.measures or (name,))]
    sides_of = {
        name: [list(scores[arm][name]) for arm in (claim.better, claim.worse)] for name in names
    }
    untrained = {name: _untrained(claim, sides_of[name], chances.get(name, 0.0)) for name in names}
    if claim.average and len(names) > 1:
        sides = [
            [statistics.mean(values) for values in zip(*of_arm, strict=True)]
            for of_arm in zip(*sides_of.values(), strict=True)
        ]
        name = f"mean of {len(names)}"
        notes = [f"{', '.join(arms)} ({measure})" for measure, arms in untrained.items() if arms]
        sides_of, untrained = {name: sides}, {name: notes}
    return [_judged(claim, name, sides, untrained[name]) for name, sides in sides_of.items()]


def _untrained(claim: Claim, sides: Sequence[Sequence[float]], floor: float) -> list[str]:
    """List the arms of a claim whose seeds are not above chance by a measure."""
    arms = zip((claim.better, claim.worse), sides, strict=True)
    return [name for name, values in arms if not is_trained(values, floor)]


def _judged(
    claim: Claim, measure: str, sides: Sequence[Sequence[float]], untrained: Sequence[str]
) -> Judged:
    better, worse = sides
    figures = (
        f"{claim.better} {statistics.mean(better):.3f}, {claim.worse} {statistics.mean(worse):.3f}"
    )
    if untrained:
        return Judged(measure, f"{UNTRAINED}: {', '.join(untrained)}", figures)
    outcome, won = verdict(claim, better, worse)
    return Judged(measure, outcome, f"{figures}, {won}")


def verdict(claim: Claim, better: Sequence[float], worse: Sequence[float]) -> tuple[str, str]:
    """Return whether a claim holds by the seeds of both arms, and the number of seeds in which
    `better` is ahead. If the means differ by less than the larger deviation, the claim is
    undecided."""
    seeds = max(len(better), len(worse))  # the teacher is scored once
    better, worse = (list(scores) * (seeds // len(scores)) for scores in (better, worse))
    gap = statistics.mean(better) - statistics.mean(worse)
    spread = max(map(statistics.stdev, (better, worse))) if seeds > 1 else 0.0
    won = sum(b > w for b, w in zip(better, worse, strict=True))
    if claim.share is not None:
        least = claim.share * statistics.mean(better)
        reached = statistics.mean(worse)
        holds, fails = reached - spread >= least, reached + spread < least
    elif claim.near is not None:
        holds, fails = gap + spread <= claim.near, gap - spread > claim.near
    elif claim.gains:
        holds, fails = gap > spread, gap < -spread
    else:
        holds, fails = gap <= 0, gap > spread
    return HOLDS if holds else FAILS if fails else UNDECIDED, f"{won} of {seeds}"


def of_tasks(source: Source, scores: Scores) -> Scores:
    """Leave out the columns of single files."""
    measures = {task.measure for task in source.tasks}
    return {
        name: {measure: values for measure, values in by_measure.items() if measure in measures}
        for name, by_measure in scores.items()
    }


def _cells(judged: Sequence[Judged]) -> tuple[str, str]:
    """Return the verdict on a claim, by measure if they differ, and its figures."""
    outcomes = dict.fromkeys(j.found for j in judged)
    by_outcome = {o: [j.measure for j in judged if j.found == o] for o in outcomes}
    phrases = [f"{o} ({', '.join(measures)})" for o, measures in by_outcome.items()]
    figures = "; ".join(f"{j.measure}: {j.figures}" for j in judged)
    return (next(iter(outcomes)) if len(outcomes) == 1 else ", ".join(phrases)), figures


def _published(claim: Claim, published: Published) -> str:
    """Return the published figures of both arms of a claim, each with its column's name, and the
    rows if their names differ from the arms'."""
    names = claim.rows or (claim.better, claim.worse)
    if not all(name in published.rows for name in names):
        return ""
    columns = [column for column in published.columns if column != SPREAD]
    prefix = f"{' / '.join(claim.rows)}: " if claim.rows else ""
    cells = zip(published.columns, *(published.rows[name] for name in names), strict=True)
    figures = ", ".join(
        f"{column} {better} / {worse}"
        for column, better, worse in cells
        if "" not in (better, worse) and column in (claim.columns or columns)
    )
    return figures and f"{prefix}{figures}"


def _words(source: Source, arm: str) -> dict[str, str]:
    """Return the options of an arm with their values; of an option that is repeated, the last."""
    options = (*source.words, *source.arms[arm].words)
    return dict(zip(options[::2], options[1::2], strict=True))


def _shared(source: Source) -> list[str]:
    """List the options that have the same value in all arms."""
    first, *others = ([*map(" ".join, _words(source, name).items())] for name in source.arms)
    return [pair for pair in first if all(pair in pairs for pairs in others)]


def _over_files(scores: Mapping[str, list[float]], main: Mapping[str, list[float]]) -> list[str]:
    """Return the deviation between the test files, in a list that is empty for a single file."""
    files = [statistics.mean(values) for name, values in scores.items() if name not in main]
    return [f"{statistics.stdev(files):.3f}"] if len(files) > 1 else []


def _share(scores: Mapping[str, list[float]], teacher: Mapping[str, list[float]]) -> str:
    """Format the share of the teacher's figures, as the mean over the measures."""
    if not all(value > 0 for (value,) in teacher.values()):
        return ""
    return f"{statistics.mean(statistics.mean(scores[m]) / teacher[m][0] for m in teacher):.0%}"


def compare_best(runs: Mapping[str, Reproduction]) -> str:
    """Compare our recipe with the best of each source: same student, data and steps."""
    head = (
        "source",
        "best arm of the source",
        "measure",
        "score of that arm",
        "score of ours",
        "ours is ahead",
    )
    rows, minutes = [], 0.0
    for name, run in runs.items():
        source = run.source
        if not {OURS, source.best} <= source.arms.keys():
            continue
        arms = {arm: source.arms[arm] for arm in (source.best, OURS)}
        run = replace(run, source=replace(source, arms=arms, joined={}, models={}))
        scores, chances = of_tasks(source, run.scores()), run.chances()
        minutes += run.minutes()
        for judged in judge(Claim("", "", OURS, source.best), scores, chances):
            sides = (scores[arm][judged.measure] for arm in (source.best, OURS))
            cells = [*map(mean_and_deviation, sides), judged.found]
            rows.append([name, source.best, judged.measure, *cells])
    return table(head, rows) + f"\n\nAll arms of these sources took {minutes:.0f} minutes."
