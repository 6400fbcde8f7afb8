"""Chooses the next run of a sweep, and ends runs early: from a list, or by a search with Optuna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from teachonce.student_train.output.ranking import comparable_figure
from teachonce.student_train.sweep.runs import Run, SweepRuns, validations
from teachonce.student_train.sweep.space import Interval, Point, Space
from teachonce.support.packages import library

DIGITS = 4
"""Significant digits of a number that is drawn, so that the table shows all of it."""
REDUCTION = 3
"""At validations 1, 3, 9, ... successive halving continues the best third of the runs that reached
it."""


class RunSource(Protocol):
    """Chooses the next run, and ends runs early."""

    def next(self) -> Run | None:
        """Return the next run to start; None if no run is left, or none can start yet."""

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        """Record the figures of a validation; return the reason why the run ends here, or "" to
        continue."""

    def ended(self, run: Run) -> None:
        """Record that a run has ended."""


class Study:
    """Wraps an Optuna study, whose pruner ends runs at validations according to `--prune`.

    `asha` (successive halving) counts validations, not steps. If all runs have the same number of
    validations, as by default, runs of different length are compared after the same share of their
    steps. Raises UserError if Optuna is missing; `what_for` names the option that needs it.
    """

    def __init__(self, prune: str, varied: Sequence[str], what_for: str) -> None:
        self.optuna = library("optuna", "tune", what_for)
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        pruners = self.optuna.pruners
        pruner = {
            "median": pruners.MedianPruner(n_startup_trials=4),
            "asha": pruners.SuccessiveHalvingPruner(1, REDUCTION),
            "none": pruners.NopPruner(),
        }[prune]
        self.study = self.optuna.create_study(direction="minimize", pruner=pruner)
        self.trials = dict[int, Any]()  # by number of the run
        self._halves, self._varied = prune == "asha", varied

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        """Report a validation, which a resumed run may repeat; return the reason why the run ends,
        or "" to continue."""
        value, trial = comparable_figure(figures, self._varied), self.trials[run.number]
        if not math.isfinite(value):
            return ""
        steps = trial.user_attrs.get("steps", [])
        # Optuna warns of a step that is reported twice.
        if step not in steps:
            steps = [*steps, step]
            trial.set_user_attr("steps", steps)
            trial.report(value, len(steps) if self._halves else step)
        if not trial.should_prune():
            return ""
        if self._halves:
            number = len(steps)
            of = sum(len(t.user_attrs.get("steps", ())) >= number for t in self.trials.values())
            return f"not among the best third of {of} at validation {number} (step {step:,}; ASHA)"
        return f"worse than the median of the trials at step {step:,}"

    def repeat(self, run: Run, before: Mapping[str, Any]) -> None:
        """Report the validations of an earlier command's run, and restore that it was pruned."""
        for step, figures in validations(run.folder):
            self.validated(run, step, figures)
        if before.get("state") == "pruned":
            run.state, run.problem = "pruned", before["problem"]


class ListedRuns:
    """Yields runs that are listed in advance; a `study` prunes some of them."""

    def __init__(self, runs: SweepRuns, study: Study | None = None) -> None:
        """Restore the state of an earlier command from runs.json and the validations."""
        self._runs, self._study = iter(list(runs.runs)), study
        if study is not None:
            earlier = {row["folder"]: row for row in runs.earlier}
            for run in runs.runs:
                study.trials[run.number] = study.study.ask()
                study.repeat(run, earlier.get(run.folder.name, {}))

    def next(self) -> Run | None:
        return next((run for run in self._runs if run.state != "pruned"), None)

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        return self._study.validated(run, step, figures) if self._study else ""

    def ended(self, run: Run) -> None:
        """Do nothing: the list is fixed."""


class Trials(Study):
    """Yields runs: the points that a tree-structured Parzen estimator (TPE) suggests."""

    # A trial depends only on `seed`, its number and the trials before it. So a killed search
    # continues with the same trials, and runs.json is all that is stored.

    def __init__(
        self,
        space: Space,
        count: int,
        seed: int,
        runs: SweepRuns,
        make: Callable[[Point], Run],
        prune: str = "median",
    ) -> None:
        """Restore the trials of runs.json; unfinished ones are done first.

        prune: the value of `--prune`. Raises UserError if Optuna is missing.
        """
        super().__init__(prune, runs.varied, "--trials")
        self.space, self.count, self.seed, self.runs, self.make = space, count, seed, runs, make
        self.distributions = {n: self._distribution(dimension) for n, dimension in space.items()}
        self.postponed: list[Run] = []

    def _distribution(self, dimension: Any) -> Any:
        kinds = self.optuna.distributions
        if not isinstance(dimension, Interval):
            return kinds.CategoricalDistribution(dimension)
        if dimension.whole:
            return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
        return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)

    def next(self) -> Run | None:
        """Return the next trial, or None if there are enough or the next one is running already."""
        if self.postponed:
            return None if self._under_way(self.postponed[0]) else self.postponed.pop(0)
        # All earlier trials count, also if --trials is now smaller: runs.json is written again and
        # would lose the others.
        count = max(self.count, len(self.runs.earlier))
        while (number := len(self.study.trials)) < count:
            run = self._drawn(number)
            if run.state == "pruned":
                self.ended(run)
            # Another trial may round to the same settings, and a folder has one writer at a time.
            elif self._under_way(run):
                self.postponed.append(run)
                return None
            else:
                return run
        return None

    def _drawn(self, number: int) -> Run:
        """Return trial `number`: an earlier command's, with its validations if it was pruned or
        trained, else a newly drawn one."""
        earlier, before = self.runs.earlier, dict[str, Any]()
        if number < len(earlier):  # drawn by an earlier command
            before = earlier[number]
            self.study.enqueue_trial(before["params"])
        # constant_liar: trials that still run count as bad, so that several at once search in
        # different places.
        self.study.sampler = self.optuna.samplers.TPESampler(
            seed=self.seed + number, constant_liar=True
        )
        trial = self.study.ask(self.distributions)
        run = self.make(self._point(trial.params))
        run.params = trial.params
        self.trials[run.number] = trial
        # The results of a finished trial are read; a failed trial is run again. If the fixed
        # options have changed, the hash in the folder's name shows that it is another student.
        same = before and before["folder"].rpartition("-")[2] == run.folder.name.rpartition("-")[2]
        if same:
            self.repeat(run, before)
        return run

    def _point(self, params: Mapping[str, Any]) -> Point:
        """Round the drawn numbers, within their ranges."""
        point = dict(params)
        for name, dimension in self.space.items():
            if isinstance(dimension, Interval) and not dimension.whole:
                rounded = float(f"{params[name]:.{DIGITS}g}")
                point[name] = min(max(rounded, dimension.low), dimension.high)
        return point

    def _under_way(self, run: Run) -> bool:
        others = (other for other in self.runs.runs if other is not run)
        return any(o.state == "running" and o.folder == run.folder for o in others)

    def ended(self, run: Run) -> None:
        """Report a finished run to Optuna. Optuna ranks a pruned trial by its last figure, and a
        trial without a figure below all others."""
        states, trial = self.optuna.trial.TrialState, self.trials[run.number]
        value = comparable_figure(run.result, self.runs.varied)
        if run.state == "finished" and math.isfinite(value):
            self.study.tell(trial, value)
        elif run.state == "pruned":
            self.study.tell(trial, state=states.PRUNED)
        else:
            if run.state == "finished":
                run.problem = run.problem or (
                    "no figure compares it with others; raise --held-out (for decoders also"
                    " --max-length), or add mlm to --loss (masked LMs only)"
                )
            self.study.tell(trial, state=states.FAIL)
