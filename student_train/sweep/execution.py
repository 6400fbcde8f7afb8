"""Does the runs of a sweep: one after the other in this process, or several at once in workers."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teachonce.student_train.sweep.runs import Pruned, Run, Runs, validations
from teachonce.student_train.sweep.scores import FILE, Task, score
from teachonce.student_train.sweep.table import SCORES
from teachonce.student_train.sweep.trials import RunSource
from teachonce.support.errors import UserError, first_line, of_path
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.output.run import Prepared
    from teachonce.student_train.settings.options import TrainOptions

Say = Callable[[str], object]
Validated = Callable[[int, dict[str, float]], object]
WAIT = 0.5  # seconds between looks for a place while no run is under way
Event = tuple[Any, ...]
"""Number of a run and what its worker sends: `say` and a line; `validated`, step and figures;
`ended`, state, result and problem; or `died` and why, which the worker itself could not send."""


@dataclass(frozen=True)
class Work:
    """What is done for a student: a training, then tasks."""

    options: TrainOptions
    tasks: tuple[Task, ...]

    def train(
        self,
        stores: list[FeatureStore],
        prepared: Prepared | None,
        on_validation: Validated | None,
        say: Say,
    ) -> dict[str, Any]:
        """Train the student, or resume it, unless it is finished; return its result."""
        from teachonce.student_train.output.report import read_report
        from teachonce.student_train.output.run import train_student
        from teachonce.student_train.plan.train_plan import plan_of
        from teachonce.training.checkpoint import newest_checkpoint, remove_checkpoints

        out = self.options.out_folder()

        def saved() -> str:
            return (
                f"{out}: {newest_checkpoint(out / 'checkpoints')}; continue with the same command"
            )

        report = read_report(out)
        if report is None or "result" not in report:
            try:
                with stoppable(saved):
                    report = train_student(
                        plan_of(self.options, *stores),
                        resume=report is not None,
                        say=say,
                        prepared=prepared,
                        on_validation=on_validation,
                    )
            except Pruned:
                remove_checkpoints(out / "checkpoints")  # nobody goes on with it
                raise
        return dict(report["result"])


def reason(error: Exception) -> str:
    """Return a line on why a student failed; for an unforeseen error, where it arose as well."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        return of_path(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {first_line(error)}"
    return f"{what} ({where.filename}, line {where.lineno})"


def finish(
    work: Work,
    stores: list[FeatureStore],
    prepared: Prepared | None,
    on_validation: Validated | None,
    say: Say,
) -> tuple[str, Any, str]:
    """Do the work; return the state of the run, its result, and its problem.

    A student whose scores fail is finished all the same. Raises Stopped.
    """
    try:
        result = work.train(stores, prepared, on_validation, say)
    except Pruned as pruned:
        return "pruned", {}, str(pruned)
    except Exception as error:  # other students go on
        return "failed", {}, reason(error)
    try:
        out = work.options.out_folder()
        scores = {t.name: score(t, str(out), out.name, out.parent, say) for t in work.tasks}
    except Exception as error:
        return "finished", result, f"its scoring failed: {reason(error)}"
    return "finished", {**result, SCORES: scores} if scores else result, ""


class Workers(Protocol):
    """Processes that do runs, each named by its number: of this machine, or of a Ray cluster."""

    deaths: int
    """Number of deaths of a run's workers, without a new validation between, that fail the run."""

    def places(self) -> int:
        """Return how many runs may be under way now."""

    def start(self, number: int, work: Work) -> None:
        """Start a worker."""

    def events(self) -> list[Event]:
        """Wait a while for what the workers send, and return it."""

    def answer(self, number: int, why: str) -> None:
        """Answer a validation: why the run ends there, or ""."""

    def stop(self) -> None:
        """Have the workers save their students, and end."""


@dataclass
class Execution:
    """Takes runs from a source, does them, and writes their states.

    total: printed after the number of a run: "/6", or "" if the number of runs is not fixed.
    """

    source: RunSource
    runs: Runs
    tasks: tuple[Task, ...]
    total: str
    say: Say

    def here(self, stores: list[FeatureStore], starts: dict[Path, Prepared]) -> None:
        """Do all runs in this process, on open stores. `starts` has students that are prepared."""
        while run := self.source.next():
            self.begin(run)
            work = Work(run.options, self.tasks)
            prepared = starts.pop(run.folder, None)
            self.end(run, *finish(work, stores, prepared, self._pruning(run), self.say))

    def _pruning(self, run: Run) -> Callable[[int, dict[str, float]], None]:
        def validated(step: int, figures: dict[str, float]) -> None:
            if why := self.source.validated(run, step, figures):
                raise Pruned(why)

        return validated

    def at_once(self, workers: Workers) -> None:
        """Do all runs in workers, as many at once as they have places for."""
        running, again = dict[int, Run](), list[Run]()
        died = defaultdict[int, list[int]](list)  # of each run: validations there were at each
        try:
            while True:
                self._fill(workers, running, again)
                if not running and not again:
                    return
                if not running:
                    time.sleep(WAIT)
                for number, what, *sent in workers.events():
                    run = running[number]
                    if what == "say":
                        self.say(f"[{number}] {sent[0]}")
                    elif what == "validated":
                        workers.answer(number, self.source.validated(run, *sent))
                    else:
                        del running[number]
                        if what == "ended":
                            self.end(run, *sent)
                        elif self._begins_again(run, sent[0], died[number], workers.deaths):
                            again.append(run)
        finally:
            workers.stop()

    def _fill(self, workers: Workers, running: dict[int, Run], again: list[Run]) -> None:
        """Start runs while there are places; without any, a run waits in `again`."""
        places = workers.places()
        while len(running) < max(1, places):
            repeated = bool(again)
            run = again.pop(0) if repeated else self.source.next()
            if run is None:
                return
            if not repeated and self._done_before(run):
                continue
            if not places:  # a node may join
                again.append(run)
                return
            if run.state != "running":
                self.begin(run)
            workers.start(run.number, Work(run.options, self.tasks))
            running[run.number] = run

    def _begins_again(self, run: Run, why: str, died: list[int], most: int) -> bool:
        """Return whether a run whose worker has died is repeated, or has failed."""
        judged = len(validations(run.folder))
        died[:] = [*(each for each in died if each >= judged), judged]
        if len(died) < most:
            self.say(f"[{run.number}] {why}; another one goes on")
            return True
        times = f", {most} times without getting further" if most > 1 else ""
        self.end(run, "failed", {}, f"{why}{times}")
        return False

    def _done_before(self, run: Run) -> bool:
        """Return whether the student is trained, and scored on all tasks; then read its result
        here, as that needs no worker."""
        folder = run.folder
        done = _is_trained(folder) and all(
            (task.folder(folder.parent, folder.name) / FILE).exists() for task in self.tasks
        )
        if done:
            self.begin(run)
            self.end(run, *finish(Work(run.options, self.tasks), [], None, None, self.say))
        return done

    def begin(self, run: Run) -> None:
        """Print and write that a run starts."""
        done = _is_trained(run.folder)
        before = " (finished before)" if done else ""
        self.say(f"[{run.number}{self.total}] {run.summary}{before}")
        run.state = "running"
        self.runs.write()

    def end(self, run: Run, state: Any, result: Mapping[str, Any], problem: str) -> None:
        """Print and write how a run has ended."""
        run.state, run.result, run.problem = state, result, problem
        if problem:
            line = f"trained; {problem}" if state == "finished" else f"{state}: {problem}"
            self.say(f"[{run.number}] {line}")
        self.source.ended(run)
        self.runs.write()


def _is_trained(folder: Path) -> bool:
    from teachonce.student_train.output.report import read_report

    return "result" in (read_report(folder) or ())
