"""Execute the runs of a sweep: one after the other in this process, or in parallel workers."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teachonce.student_train.output.ranking import SCORES
from teachonce.student_train.sweep.runs import Pruned, Run, SweepRuns, validations
from teachonce.student_train.sweep.scores import FILE, ScoringTask, score
from teachonce.student_train.sweep.trials import RunSource
from teachonce.support.errors import UserError, first_line, os_error_line
from teachonce.support.redaction import redacted
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.prepared_student import Prepared
    from teachonce.student_train.settings.options import TrainOptions

Say = Callable[[str], object]
EndReason = Callable[[int, dict[str, float]], str]
"""Receives step and figures of a validation; returns why the run ends there, or "" to continue."""
WAIT = 0.5  # seconds between checks for a free place while no run is active
Event = tuple[Any, ...]
"""Number of a run, kind of the event, and its values: `say`, a line to print; `validated`, step and
figures; `ended`, state, result and problem; `died`, the reason (sent in place of a dead worker)."""


@dataclass(frozen=True)
class Work:
    """Holds a student to train, and the tasks on which to score it."""

    options: TrainOptions
    tasks: tuple[ScoringTask, ...]

    def train(
        self, stores: list[FeatureStore], prepared: Prepared | None, end_reason: EndReason, say: Say
    ) -> dict[str, Any]:
        """Train the student, or resume it, unless it is finished; return its result. Raises Pruned
        if a validation ends the run."""
        # Imported here: the settings of a sweep are checked before torch is imported.
        from teachonce.student_train.output.report import check_same_settings, read_report
        from teachonce.student_train.output.run import train_student
        from teachonce.student_train.plan.train_plan import plan_of
        from teachonce.training.checkpoint import newest_checkpoint, remove_checkpoints

        out = self.options.out_folder()
        checkpoints = out / "checkpoints"

        def saved() -> str:
            return f"{out}: {newest_checkpoint(checkpoints)}; continue with the same command"

        def validated(step: int, figures: dict[str, float]) -> None:
            if why := end_reason(step, figures):
                raise Pruned(why)

        report = read_report(out)
        if report is None or "result" not in report:
            try:
                with stoppable(saved):
                    report = train_student(
                        plan_of(self.options, *stores),
                        resume=report is not None,
                        say=say,
                        prepared=prepared,
                        on_validation=validated,
                    )
            except Pruned:
                remove_checkpoints(checkpoints)  # a pruned training is never resumed
                raise
        else:
            check_same_settings(out, report, redacted(self.options.describing()), of_sweep=True)
        return dict(report["result"])


def error_line(error: Exception) -> str:
    """Describe an error in one line; an unforeseen error with its file and line."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        return os_error_line(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {first_line(error)}"
    return f"{message} ({frame.filename}, line {frame.lineno})"


def finish(
    work: Work,
    stores: list[FeatureStore],
    prepared: Prepared | None,
    end_reason: EndReason,
    say: Say,
) -> tuple[str, Any, str]:
    """Train and score a student. Return the state of the run, its result, and its problem ("" if
    none).

    If scoring fails, the state is still `finished`. Raises Stopped.
    """
    try:
        result = work.train(stores, prepared, end_reason, say)
    except Pruned as pruned:
        return "pruned", {}, str(pruned)
    except Exception as error:  # the other students are trained all the same
        return "failed", {}, error_line(error)
    try:
        out = work.options.out_folder()
        scores = {t.name: score(t, str(out), out.name, out.parent, say) for t in work.tasks}
    except Exception as error:
        return "finished", result, f"its scoring failed: {error_line(error)}"
    return "finished", {**result, SCORES: scores} if scores else result, ""


class Workers(Protocol):
    """Executes runs in worker processes: on this machine, or on a Ray cluster."""

    deaths: int
    """The run fails after this many deaths of its workers without a new validation in between."""

    def places(self) -> int:
        """Return how many runs may be active at once now."""

    def start(self, number: int, work: Work) -> None:
        """Start a worker for the run of this number."""

    def events(self) -> list[Event]:
        """Wait for events of the workers, for a limited time, and return them."""

    def answer(self, number: int, why: str) -> None:
        """Answer a validation: with the reason why the run ends there, or "" to continue."""

    def stop(self) -> None:
        """Make the workers save their students and exit."""


@dataclass
class Execution:
    """Executes the runs of a source, and writes their states to runs.json.

    total: printed after the number of a run: "/6", or "" if the number of runs is not fixed.
    """

    source: RunSource
    runs: SweepRuns
    tasks: tuple[ScoringTask, ...]
    total: str
    say: Say

    def here(self, stores: list[FeatureStore], starts: dict[Path, Prepared]) -> None:
        """Execute all runs in this process.

        stores: open stores. starts: students that are already prepared, by folder.
        """
        while run := self.source.next():
            self._execute(run, stores, starts.pop(run.folder, None))

    def _execute(self, run: Run, stores: list[FeatureStore], prepared: Prepared | None) -> None:
        self.begin(run)
        work, end_reason = Work(run.options, self.tasks), partial(self.source.validated, run)
        self.end(run, *finish(work, stores, prepared, end_reason, self.say))

    def at_once(self, workers: Workers) -> None:
        """Execute all runs in workers, as many in parallel as `Workers.places` returns."""
        running, queue = dict[int, Run](), list[Run]()
        died = defaultdict[int, list[int]](list)  # by run: its number of validations at each death
        try:
            while True:
                self._fill(workers, running, queue)
                if not running and not queue:
                    return
                if not running:
                    time.sleep(WAIT)
                for number, kind, *values in workers.events():
                    run = running[number]
                    if kind == "say":
                        self.say(f"[{number}] {values[0]}")
                    elif kind == "validated":
                        workers.answer(number, self.source.validated(run, *values))
                    else:
                        del running[number]
                        if kind == "ended":
                            self.end(run, *values)
                        elif self._is_repeated(run, values[0], died[number], workers.deaths):
                            queue.append(run)
        finally:
            workers.stop()

    def _fill(self, workers: Workers, running: dict[int, Run], queue: list[Run]) -> None:
        """Start runs until as many are active as `Workers.places` allows. If it allows none, one
        run waits in `queue`."""
        places = workers.places()
        # At least 1: otherwise `at_once` would end when a cluster has no places.
        while len(running) < max(1, places):
            repeated = bool(queue)
            run = queue.pop(0) if repeated else self.source.next()
            if run is None:
                return
            if not repeated and self._done_before(run):
                continue
            if not places:  # a node may join
                queue.append(run)
                return
            if run.state != "running":
                self.begin(run)
            workers.start(run.number, Work(run.options, self.tasks))
            running[run.number] = run

    def _is_repeated(self, run: Run, why: str, died: list[int], most: int) -> bool:
        """Return whether to repeat a run whose worker has died; if not, mark it as failed."""
        judged = len(validations(run.folder))
        died[:] = [*(n for n in died if n >= judged), judged]
        if len(died) < most:
            self.say(f"[{run.number}] {why}; another worker resumes the run")
            return True
        times = f", {most} times without progress" if most > 1 else ""
        self.end(run, "failed", {}, f"{why}{times}")
        return False

    def _done_before(self, run: Run) -> bool:
        """Return whether the student is trained and scored on all tasks, and record its result."""
        # Recorded here: reading a result needs no worker.
        folder = run.folder
        done = _is_trained(folder) and all(
            (task.folder(folder.parent, folder.name) / FILE).exists() for task in self.tasks
        )
        if done:
            self._execute(run, [], None)
        return done

    def begin(self, run: Run) -> None:
        """Print that a run starts, and write it to runs.json."""
        note = " (finished before)" if _is_trained(run.folder) else ""
        self.say(f"[{run.number}{self.total}] {run.summary}{note}")
        run.state = "running"
        self.runs.write()

    def end(self, run: Run, state: Any, result: Mapping[str, Any], problem: str) -> None:
        """Print how a run has ended, and write it to runs.json."""
        run.state, run.result, run.problem = state, result, problem
        self.source.ended(run)  # which may find a problem, too
        if run.problem:
            line = f"trained; {run.problem}" if state == "finished" else f"{state}: {run.problem}"
            self.say(f"[{run.number}] {line}")
        self.runs.write()


def _is_trained(folder: Path) -> bool:
    from teachonce.student_train.output.report import read_report

    return "result" in (read_report(folder) or ())
