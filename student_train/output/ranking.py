"""Which student of a sweep is best: by a measure that compares them, whatever they learnt."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
"""Settings that vary in a sweep, and results of a student, as in sweep.json."""

SWEEP = "sweep.json"
SCORED = "scores"
"""Folder of a sweep with a run of downstream, MODEL/TASK, for each model and task."""


@dataclass(frozen=True)
class Measure:
    """A figure of a validation. `why` tells what it compares; the `best` is the largest or the
    smallest."""

    name: str
    why: str
    largest: bool = False

    def of(self, row: Row) -> float:
        """Return a figure of which the smallest is best, infinity where the student has none."""
        value = row.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return -value if self.largest else value


MEASURES = (
    Measure("valid_accuracy", "the share of gold labels that a student gives", largest=True),
    Measure("valid_agreement", "the share of the teacher's best labels that a student gives", True),
    Measure("valid_spearman", "rank correlation with the teacher's similarities of texts", True),
    Measure(
        "valid_mlm_per_character",
        "nats a character, which compare students of any vocabulary and losses",
    ),
)
LOSS = Measure("valid_loss", "the loss, which all of them learnt by")
# Settings that make of a validation's loss another quantity, or another text that it is of.
OF_LOSS = frozenset(
    {  # fmt: skip
        "align",
        "batch_texts",
        "batch_tokens",
        "combine",
        "data",
        "held_out",
        "loss",
        "mask_prob",
        "mask_words",
        "matryoshka",
        "max_length",
        "max_masks",
        "others",
        "outputs",
        "pool",
        "projection",
        "recipe",
        "targets",
        "temperature",
        "view",
        "vocab",
    }
)


def judged(figures: Row, varied: Collection[str]) -> float:
    """Judge a student by the first measure that compares it with the others of a sweep of which
    `varied` are the settings: the smallest is best, infinity where nothing compares them."""
    loss = [LOSS] if compares_losses(varied) else []
    values = (measure.of(figures) for measure in (*MEASURES, *loss))
    return next(filter(math.isfinite, values), math.inf)


def measure_of(rows: Sequence[Row]) -> Measure | None:
    """Choose what tells the best of these students; None where nothing compares them.

    The loss of the validation compares those alone that learnt by the same losses of the same
    pieces.
    """
    for measure in MEASURES:
        if any(measure.of(row) < math.inf for row in rows):
            return measure
    same = all(compares_losses(row.keys()) for row in rows)
    return LOSS if same and any(LOSS.of(row) < math.inf for row in rows) else None


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Sort students, the best first, and those last that have no figure to be judged by."""
    measure = measure_of(rows)
    return list(rows) if measure is None else sorted(rows, key=measure.of)


def compares_losses(varied: Collection[str]) -> bool:
    """Tell whether the loss of a validation is one quantity where these settings vary."""
    return not OF_LOSS.intersection(varied)


def told_best(rows: Sequence[Row]) -> str:
    """Tell in a line which of the ranked students is best, and by what; or why none is."""
    measure = measure_of(rows)
    if measure is None:
        return (
            "best      none can be told: these students share no measure; losses of other settings"
            " are other quantities. Add mlm to --loss, or score them with downstream"
        )
    best, last = rows[0], [row for row in rows if measure.of(row) == math.inf]
    without = f"; {len(last)} without it come last" if last else ""
    figure = f"{measure.name} {best[measure.name]:.5g}"
    return f"best      {best['folder']}: {figure} ({measure.why}{without})"
