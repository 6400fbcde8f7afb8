"""Does the runs of a sweep: one after the other in this process, or several at once in others."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teachonce.student_train.output.ranking import judged
from teachonce.student_train.sweep.halving import Halving
from teachonce.student_train.sweep.runs import Pruned, Run, Runs
from teachonce.student_train.sweep.scores import FILE, Task
from teachonce.student_train.sweep.student import Say, Work, finish, in_child
from teachonce.student_train.sweep.validations import validations
from teachonce.support.environment import variable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.output.run import Prepared


Running = dict[connection.Connection, tuple[int, Run, process.BaseProcess]]
"""Slot, run and process at the other end of each pipe."""


class Source(Protocol):
    """Says which student is next."""

    def next(self) -> Run | None:
        """Return a run to do now; None where there is none (yet)."""

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        """Take the figures of a validation; return why the run ends here, or ""."""

    def ended(self, run: Run) -> None:
        """Take the run that has ended."""


class Listed:
    """A source of runs that are known beforehand; `asha` ends some of them (see `Halving`)."""

    def __init__(self, runs: Runs, asha: bool = False) -> None:
        """Take up what runs.json and the validations tell of an earlier command."""
        self._varied, self._runs = runs.varied, iter(list(runs.runs))
        self._halving = Halving() if asha else None
        for run in runs.runs if asha else ():
            for step, figures in validations(run.folder):
                self.validated(run, step, figures)
        before = runs.before["runs"] if runs.before and asha else []
        self._pruned = {
            each["folder"]: each["problem"] for each in before if each["state"] == "pruned"
        }

    def next(self) -> Run | None:
        for run in self._runs:
            if run.folder.name not in self._pruned:
                return run
            run.state, run.problem = "pruned", self._pruned[run.folder.name]
        return None

    def validated(self, run: Run, step: int, figures: Mapping[str, float]) -> str:
        value = judged(figures, self._varied)
        if self._halving is None or not math.isfinite(value):
            return ""
        return self._halving.judge(run.number, step, value)

    def ended(self, run: Run) -> None:
        """Learn nothing from it."""


@dataclass
class Execution:
    """Takes runs from a source, does them, and writes how they stand."""

    source: Source
    runs: Runs
    tasks: tuple[Task, ...]
    heading: Callable[[Run], str]
    say: Say

    def here(self, stores: list[FeatureStore], starts: dict[Path, Prepared]) -> None:
        """Do all runs in this process, on open stores. `starts` has students that are prepared."""
        while run := self.source.next():
            self.begin(run)
            ended = finish(
                Work(run.options, self.tasks),
                stores,
                starts.pop(run.folder, None),
                self._pruning(run),
                self.say,
            )
            self.end(run, *ended)

    def _pruning(self, run: Run) -> Callable[[int, dict[str, float]], None]:
        def validated(step: int, figures: dict[str, float]) -> None:
            if why := self.source.validated(run, step, figures):
                raise Pruned(why)

        return validated

    def at_once(self, jobs: int, gpus: int) -> None:
        """Do `jobs` runs at once, each in a process of its own; of several GPUs each has one."""
        running: Running = {}
        try:
            with variable("OMP_NUM_THREADS", _threads(jobs)), variable("TQDM_DISABLE", "1"):
                while True:
                    free = set(range(jobs)) - {slot for slot, *_ in running.values()}
                    while free and (run := self.source.next()):
                        if self.done_before(run):
                            continue
                        slot = free.pop()
                        pipe, child = self._start(run, slot % gpus if gpus else None)
                        running[pipe] = slot, run, child
                    if not running:
                        return
                    for pipe in _told(running):
                        if self._hear(pipe, *running[pipe][1:]):
                            del running[pipe]
        finally:
            self._stop(running)

    def _stop(self, running: Running) -> None:
        """Have the children save themselves. What they still ask is answered: none may hang."""
        for _, _, child in running.values():
            child.terminate()
        while running:
            for pipe in _told(running):
                try:
                    if pipe.recv()[0] == "validated":
                        pipe.send("")
                except (EOFError, OSError):
                    running.pop(pipe)[2].join()

    def _start(
        self, run: Run, gpu: int | None
    ) -> tuple[connection.Connection, process.BaseProcess]:
        self.begin(run)
        context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads
        ours, theirs = context.Pipe()
        work = Work(run.options, self.tasks)
        child = context.Process(target=in_child, args=(work, gpu, theirs))
        child.start()
        theirs.close()  # so that its end is heard
        return ours, child

    def _hear(self, pipe: connection.Connection, run: Run, child: process.BaseProcess) -> bool:
        """Take what a child tells; tell whether it has ended."""
        try:
            what, *told = pipe.recv()
        except (EOFError, ConnectionResetError):
            child.join()
            self.end(run, "failed", {}, f"its process ended with {child.exitcode}")
            return True
        if what == "validated":
            pipe.send(self.source.validated(run, *told))
        elif what == "say":
            self.say(f"[{run.number}] {told[0]}")
        else:
            child.join()
            self.end(run, *told)
        return bool(what == "ended")

    def done_before(self, run: Run) -> bool:
        """Tell whether the student is trained, and scored on all tasks; then take it up, as no
        process is needed to read what stands there."""
        folder = run.folder
        done = _is_trained(folder) and all(
            (task.folder(folder.parent, folder.name) / FILE).exists() for task in self.tasks
        )
        if done:
            self.begin(run)
            self.end(run, *finish(Work(run.options, self.tasks), [], None, None, self.say))
        return done

    def begin(self, run: Run) -> None:
        """Tell that a run begins."""
        done = _is_trained(run.folder)
        self.say(f"{self.heading(run)}{' (finished before)' if done else ''}")
        run.state = "running"
        self.runs.write()

    def end(self, run: Run, state: Any, result: Mapping[str, Any], problem: str) -> None:
        """Take how a run has ended."""
        run.state, run.result, run.problem = state, result, problem
        if problem:
            told = f"trained; {problem}" if state == "finished" else f"{state}: {problem}"
            self.say(f"[{run.number}] {told}")
        self.source.ended(run)
        self.runs.write()


def _is_trained(folder: Path) -> bool:
    from teachonce.student_train.output.report import read_report

    return "result" in (read_report(folder) or ())


def _told(running: Running) -> list[connection.Connection]:
    """Wait until a child tells something, or ends; return the pipes of those that do."""
    ready = connection.wait(list(running))
    return [pipe for pipe in running if pipe in ready]


def _threads(jobs: int) -> str:
    """Share out the cores among the jobs, where the user has not."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))
