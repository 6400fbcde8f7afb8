"""Asynchronous successive halving (ASHA, Li et al. 2020, algorithm 2, in the form that ends runs):
at its 1st, 3rd, 9th, ... validation a run goes on where it is among the best third of those that
came as far."""

from __future__ import annotations

import math

REDUCTION = 3


class Halving:
    """Judges runs by their validations, of which the smallest figure is best.

    Rungs are numbers of validations, not steps: so runs of unlike length are held against one
    another after the same share of each.
    """

    def __init__(self) -> None:
        self._steps = dict[int, list[int]]()  # of the validations of each run
        self._rungs = dict[int, dict[int, float]]()  # figures of runs, by number of validation

    def judge(self, run: int, step: int, figure: float) -> str:
        """Take a validation of a run, which is told again where the run was resumed; return why the
        run ends here, or ""."""
        steps = self._steps.setdefault(run, [])
        if step not in steps:
            steps.append(step)
        number = steps.index(step) + 1
        if number != REDUCTION ** round(math.log(number, REDUCTION)):
            return ""
        rung = self._rungs.setdefault(number, {})
        rung[run] = figure
        better = sum(other < figure for other in rung.values())
        if better < math.ceil(len(rung) / REDUCTION):
            return ""
        return (
            f"not among the best third of {len(rung)} at validation {number} (step {step:,}; ASHA)"
        )
