"""Ranks the students of a sweep: by the score of a task where one was scored, else by a validation
figure that is comparable between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Row = Mapping[str, Any]
"""The varied settings and the results of a student, as in sweep.json."""

SWEEP = "sweep.json"
SCORED = "scores"
"""Folder, within a sweep's folder, with a downstream run MODEL/TASK for each model and task."""
SCORES = "scores"
"""Key of a row for the figures of each task, by name."""
DEVIATION, QUARTILES = "deviation", ("lower quartile", "upper quartile")
"""Endings of the names of a figure's standard deviation over seeds, and of its quartiles over
repetitions."""
SPREADS = (DEVIATION, *QUARTILES)


TEXT = frozenset({"held_out", "max_length", "others", "store"})
"""Settings that change the text on which students are validated."""
MASKS = frozenset({"mask_prob", "mask_words", "max_masks", "recipe", "view"})
"""Settings that change which tokens of this text are masked: fewer masks are easier to fill."""


@dataclass(frozen=True)
class Measure:
    """Describes a figure by which students are ranked.

    meaning: what the figure is, for messages and pages. largest: whether larger is better.
    text_settings: settings that change the text or the tokens on which the figure is computed.
        Students that differ in one of these settings are not compared by the figure.
    """

    name: str
    meaning: str
    largest: bool = False
    text_settings: frozenset[str] = TEXT

    def of(self, row: Row) -> float:
        """Return the figure of a row, negated if larger is better, so that the smallest is best;
        infinity if the student has none."""
        value = row.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return -value if self.largest else value


MEASURES = (
    Measure("valid_accuracy", "the share of gold labels that a student gives", largest=True),
    Measure("valid_agreement", "the share of the teacher's best labels that a student gives", True),
    Measure("valid_spearman", "rank correlation with the teacher's scores or similarities", True),
    Measure(
        "valid_mlm_per_character",
        "nats per character, comparable between vocabularies and losses",
        text_settings=TEXT | MASKS,
    ),
    Measure("valid_bits_per_byte", "bits per byte, comparable between vocabularies and losses"),
)
LOSS = Measure("valid_loss", "the loss, which is the same for all of them")
SETTING = "setting"
"""Key of a row of `over_seeds` for its settings as text."""
SMALLER_IS_BETTER = " ↓"
"""Ends the headings of scores of which the smallest is the best."""
LEAST = ("nats/character", "bits/byte", SMALLER_IS_BETTER)
"""Endings of the names of scores of which the smallest is the best."""
NO_SCORE = ("sentence_ms", "batch_ms", "disk_bytes", "nats/token", "perplexity", *SPREADS)
"""Figures of a task that are not scores, or that vocabularies of different sizes cannot share."""
CONSTANT = ("entity F1", "Matthews", "Pearson", "Spearman")
"""Scores that are 0 for a model which gives the same answer to everything, and rarely for
others."""
# Settings that change the definition of the validation loss, or the text on which it is computed.
# Losses of text vectors compare the texts of a batch; a loss per token depends on the vocabulary.
OF_LOSS = frozenset({
    "align", "batch_texts", "batch_tokens", "combine", "data", "held_out", "loss", "mask_prob",
    "mask_words", "matryoshka", "max_length", "max_masks", "others", "outputs", "pool",
    "projection", "recipe", "store", "targets", "temperature", "view", "vocab",
})  # fmt: skip


def comparable_figure(figures: Row, varied: Collection[str]) -> float:
    """Return a student's figure by its first comparable measure. The smallest is best; infinity if
    no measure is comparable.

    varied: the settings that vary in the sweep.
    """
    values = (measure.of(figures) for measure in comparable(varied))
    return next(filter(math.isfinite, values), math.inf)


def answers_alike(figures: Row) -> bool:
    """Return whether the figures show that a student gives the same answer to every text.

    figures: as `flat_row` returns them. The scores of all tasks with a suitable measure decide;
        without such a task, the validation. A student that is always right, because all gold labels
        are equal, does not count.
    """
    tasks = {name: end for name in figures for end in CONSTANT if name.endswith(f" {end}")}
    if tasks:
        return all(
            figures[name] == 0 and figures.get(f"{name.removesuffix(end)}accuracy") != 100
            for name, end in tasks.items()
        )
    # The teacher has labels for all held-out texts, people only for some.
    for share in ("valid_agreement", "valid_accuracy"):
        if f"{share}_matthews" in figures:
            return bool(figures[f"{share}_matthews"] == 0 and figures.get(share) != 1)
    return False


def flat_row(row: Row) -> Row:
    """Return a row in which each score of a task is its own column, such as `sst2 accuracy`."""
    columns = {name: value for name, value in row.items() if name != SCORES}
    for task, scores in row.get(SCORES, {}).items():
        for name, value in scores.items():
            columns[f"{task} {name}"] = value
    return columns


def measures_of(rows: Sequence[Row], varied: Collection[str]) -> list[Measure]:
    """List the measures by which students can be ranked: scores of tasks, then validation figures,
    the most comparable first.

    rows: as `flat_row` returns them. The validation loss is comparable only if no setting in
        `OF_LOSS` varies.
    """
    # `flat_row` joins a task and its score by a space, which no other column has.
    names = dict.fromkeys(name for row in rows for name in row if " " in name)
    tasks = [_of_task(name) for name in names if not name.endswith(NO_SCORE)]
    return [m for m in (*tasks, *comparable(varied)) if any(m.of(row) < math.inf for row in rows)]


def comparable(varied: Collection[str]) -> list[Measure]:
    """List the measures of validations that are comparable if these settings vary."""
    measures = [measure for measure in MEASURES if not measure.text_settings.intersection(varied)]
    return [*measures, LOSS] if compares_losses(varied) else measures


def _of_task(column: str) -> Measure:
    """Return the measure of a column `TASK SCORE`."""
    if column.endswith(LEAST):
        return Measure(column, "a score of a task, smaller is better")
    return Measure(column, "a score of a task", largest=True)


def measure_of(rows: Sequence[Row]) -> Measure | None:
    """Return the measure by which students are ranked; None if they have no measure in common."""
    varied = {name for row in rows for name in row}
    return next(iter(measures_of([*map(flat_row, rows)], varied)), None)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sort students, the best first; the next measures decide between equal ones.

    Students that give the same answer to every text come after the others. Students without a
    figure come last.
    """
    measures = measures_of([*map(flat_row, rows)], {name for row in rows for name in row})

    def sort_key(row: Row) -> tuple[bool, bool, list[float]]:
        figures = flat_row(row)
        values = [measure.of(figures) for measure in measures]
        return values[:1] == [math.inf], answers_alike(figures), values

    return sorted(rows, key=sort_key) if measures else list(rows)


def compares_losses(varied: Collection[str]) -> bool:
    """Return whether the validation loss is comparable if these settings vary."""
    return not OF_LOSS.intersection(varied)


def over_seeds(rows: Sequence[Row], varied: Sequence[str]) -> list[Row]:
    """Return a row for each setting with several seeds, the best mean first. A row has the number
    of seeds, the folder of the best student, and the means of the figures that all its students
    have. The measure by which students are ranked is text, with its sample standard deviation.

    rows: ranked students. varied: the settings that vary. Returns [] without several seeds, or
        without a measure that all students have.
    """
    measure, settings = measure_of(rows), [name for name in varied if name != "seed"]
    groups = dict[tuple[str, ...], list[Row]]()
    for row in map(flat_row, rows):
        groups.setdefault(tuple(str(row.get(name)) for name in settings), []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    if "seed" not in varied or measure is None or not several:
        return []
    means = list[tuple[float, Row]]()
    for group in several:
        judged_by = [measure.of(row) for row in group]
        if math.inf in judged_by:
            return []
        best, figures = group[0], group[0].keys() - {*varied}
        numbers = {n for n in figures if all(isinstance(row.get(n), int | float) for row in group)}
        mean = {n: best[n] if n not in numbers else fmean(row[n] for row in group) for n in figures}
        text = f"{mean[measure.name]:.4g} ± {stdev(judged_by):.1g}"
        words = [f"{name} {best.get(name)}" for name in settings]
        words.append(f"{len(group)} seeds")
        found = {**mean, **{name: best.get(name) for name in settings}, measure.name: text}
        found |= {"seeds": len(group), SETTING: ", ".join(words)}
        means.append((fmean(judged_by), found))
    return [row for _, row in sorted(means, key=lambda each: each[0])]


def describe_best(rows: Sequence[Row], means: Sequence[Row] = ()) -> str:
    """Return a line with the best of ranked students and its measure, or why there is none.

    means: the rows of `over_seeds`. If there are any, the line names the best setting: one student
        may be ahead by its seed alone.
    """
    measure = measure_of(rows)
    if measure is None:
        return (
            "best      unknown: these students have no measure in common: their losses differ, or"
            " nothing held out can be compared. Raise --held-out (for decoders also --max-length),"
            " add mlm to --loss (masked LMs only), or score them with downstream"
        )
    best, last = flat_row(rows[0]), [row for row in rows if measure.of(flat_row(row)) == math.inf]
    without = f"; {len(last)} without it come last" if last else ""
    if answers_alike(best):
        return (
            "best      none: the figures show that each student gives the same answer to every"
            " text; train longer, or raise --lr"
        )
    if means:
        mean = means[0]
        figure = f"{measure.name} {mean[measure.name]} ({measure.meaning})"
        return f"best      {mean[SETTING]}: {figure}; its best student is {mean['folder']}"
    figure = f"{measure.name} {best[measure.name]:.5g}"
    return f"best      {best['folder']}: {figure} ({measure.meaning}{without})"
