"""`--trials N`: Optuna searches the space of a sweep; validations end trials (`--prune`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from teachonce.student_train.output.ranking import judged
from teachonce.student_train.sweep.halving import Halving
from teachonce.student_train.sweep.runs import Run, Runs
from teachonce.student_train.sweep.space import Interval, Point, Space
from teachonce.student_train.sweep.validations import validations
from teachonce.support.extras import library

DIGITS = 4
"""Significant digits of a number that is drawn, so that the table tells the whole of it."""


class Trials:
    """A source of runs: points that a tree-structured Parzen estimator suggests after those that
    are known.

    The draw of a trial depends on `seed`, its number and the trials before it alone, so that a
    search that was killed goes on as it would have. Only runs.json is kept.
    """

    def __init__(
        self,
        space: Space,
        count: int,
        seed: int,
        runs: Runs,
        make: Callable[[Point], Run],
        prune: str = "median",
    ) -> None:
        """Take up the trials of runs.json; those that had not ended are done first. `prune` is the
        word of the option.

        Raises UserError where Optuna is missing.
        """
        self.optuna = library("optuna", "tune", "--trials")
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        self.space, self.count, self.seed, self.runs, self.make = space, count, seed, runs, make
        median = self.optuna.pruners.MedianPruner(n_startup_trials=4)
        nothing = self.optuna.pruners.NopPruner()
        self.study = self.optuna.create_study(
            direction="minimize", pruner=median if prune == "median" else nothing
        )
        self.halving = Halving() if prune == "asha" else None
        self.distributions = {n: self._distribution(each) for n, each in space.items()}
        self.asked = dict[int, Any]()
        self.known = list(runs.before["runs"]) if runs.before else []
        self.aside: list[Run] = []

    def _distribution(self, each: Any) -> Any:
        kinds = self.optuna.distributions
        if not isinstance(each, Interval):
            return kinds.CategoricalDistribution(each)
        if each.whole:
            return kinds.IntDistribution(int(each.low), int(each.high), log=each.log)
        return kinds.FloatDistribution(each.low, each.high, log=each.log)

    def next(self) -> Run | None:
        """Return the next trial. None when there are enough, or the next is one that is under way
        already."""
        if self.aside:
            return None if self._under_way(self.aside[0]) else self.aside.pop(0)
        number = len(self.study.trials)
        if number >= max(self.count, len(self.known)):
            return None
        if number < len(self.known):  # drawn by an earlier command
            self.study.enqueue_trial(self.known[number]["params"])
        self.study.sampler = self.optuna.samplers.TPESampler(
            seed=self.seed + number, constant_liar=True
        )
        trial = self.study.ask(self.distributions)
        run = self.make(self._point(trial.params))
        run.params = trial.params
        self.asked[run.number] = trial
        if number < len(self.known) and self._has_ended(run, self.known[number]):
            return self.next()
        if self._under_way(run):
            self.aside.append(run)
            return None
        return run

    def _point(self, params: Mapping[str, Any]) -> Point:
        """Round what was drawn, within its range."""
        point = dict(params)
        for name, each in self.space.items():
            if isinstance(each, Interval) and not each.whole:
                rounded = float(f"{params[name]:.{DIGITS}g}")
                point[name] = min(max(rounded, each.low), each.high)
        return point

    def _under_way(self, run: Run) -> bool:
        others = (other for other in self.runs.runs if other is not run)
        return any(o.state == "running" and o.folder == run.folder for o in others)

    def _has_ended(self, run: Run, before: Mapping[str, Any]) -> bool:
        """Take up a trial as an earlier command left it; tell whether it had ended for good."""
        for step, figures in validations(run.folder):
            self.validated(run, step, figures)
        if before["state"] != "pruned":
            return False  # a finished one is read again, a failed one tried again
        run.state, run.problem = "pruned", before["problem"]
        self.ended(run)
        return True

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        """Tell Optuna of a validation; return why the trial ends, or ""."""
        value = judged(figures, self.runs.varied)
        if not math.isfinite(value):
            return ""
        # A trial that was ended counts by its last figure; without one as worse than any.
        self.asked[run.number].report(value, step)
        if self.halving:
            return self.halving.judge(run.number, step, value)
        if not self.asked[run.number].should_prune():
            return ""
        return f"worse than the median of the trials at step {step:,}"

    def ended(self, run: Run) -> None:
        """Learn from a run that has ended."""
        state, states = run.state, self.optuna.trial.TrialState
        value = judged(run.result, self.runs.varied)
        if state == "finished" and math.isfinite(value):
            self.study.tell(self.asked[run.number], value)
        elif state == "pruned":
            self.study.tell(self.asked[run.number], state=states.PRUNED)
        else:
            if state == "finished":
                run.problem = run.problem or "no figure compares it with others; add mlm to --loss"
            self.study.tell(self.asked[run.number], state=states.FAIL)
