"""The runs of a sweep on a Ray cluster: one student a task, with its share of a GPU.

The driver, which typed the command, hands out runs while nodes have room, and alone writes
runs.json. A student lies in the sweep's folder, on a disk that all nodes see: where its worker or
node dies, another task goes on from its checkpoint. If the driver dies, Ray ends its workers, and
the same command goes on run by run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from teachonce.student_train.sweep.execution import Execution
from teachonce.student_train.sweep.runs import Pruned, Run
from teachonce.student_train.sweep.student import Work, finish, reason
from teachonce.student_train.sweep.validations import validations
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import BEAT, MISSED, Taken, check_free
from teachonce.support.ray_cluster import Home, gpus_of_worker, rooms, short
from teachonce.support.signals import Stop

LOOK = 0.5  # seconds between looks at what workers tell, and at the nodes
SAVING = 60.0  # seconds that workers have to save their students after a stop
DEATHS = 3  # of a run's workers, one after the other without a new validation: a reason to give up

Key = tuple[int, int]
"""Number of a run, and which of its workers this is."""


class Desk:
    """An actor between the workers and the driver: they tell and ask, it hears and answers."""

    def __init__(self) -> None:
        self._told = list[tuple[Any, ...]]()
        self._answers = dict[Key, str]()
        self._changed = threading.Condition()

    def say(self, key: Key, line: str) -> None:
        with self._changed:
            self._told.append((key, "say", line))

    def validated(self, key: Key, step: int, figures: Mapping[str, float]) -> str:
        """Ask the driver why the run ends here, or ""; wait for its answer."""
        with self._changed:
            self._told.append((key, "validated", step, dict(figures)))
            self._changed.wait_for(lambda: key in self._answers)
            return self._answers.pop(key)

    def heard(self) -> list[tuple[Any, ...]]:
        """Give what was told since the last time."""
        with self._changed:
            told, self._told = self._told, []
            return told

    def answer(self, key: Key, why: str) -> None:
        with self._changed:
            self._answers[key] = why
            self._changed.notify_all()


def worker(work: Work, home: Home, desk: Any, key: Key) -> tuple[str, Any, str]:
    """Train and score a student; return the state of the run, its result and its problem, or
    `refused` with what is wrong with this node."""
    import ray

    def validated(step: int, figures: dict[str, float]) -> None:
        if why := ray.get(desk.validated.remote(key, step, figures)):
            raise Pruned(why)

    host = socket.gethostname()
    try:
        home.enter()
    except (UserError, OSError) as error:
        return "refused", {}, f"{host}: {reason(error)}"
    try:
        from teachonce.student_train.output.run import open_stores

        _wait_until_free(work.options.out_folder())
        work = replace(work, options=work.options.resolved())
        with open_stores(work.options) as stores:
            return finish(work, stores, None, validated, lambda line: desk.say.remote(key, line))
    except Exception as error:  # other students go on
        return "failed", {}, f"on {host}: {reason(error)}"


def _wait_until_free(out: Path) -> None:
    """Wait for the death of a student's writer to be certain: on another machine only its silence
    tells. Raises Taken where it goes on."""
    end = time.monotonic() + BEAT * (MISSED + 1)
    while True:
        try:
            return check_free(out)
        except Taken:
            if time.monotonic() > end:
                raise
        time.sleep(1)


class Cluster:
    """The driver: keeps a task running for each place, as long as there are runs."""

    def __init__(
        self,
        ray: Any,
        execution: Execution,
        address: str,
        gpus: float | None,
        home: Home,
        stop: Stop,
    ) -> None:
        self._ray, self._execution, self._address, self._home = ray, execution, address, home
        self._stop, self._asked = stop, gpus
        self._running = dict[Any, tuple[Run, Key]]()
        self._again = list[Run]()
        self._deaths = dict[int, list[int]]()  # of each run: validations there were at each
        self._begun, self._line = 0, ""

    def run(self, device: str) -> None:
        """Do all runs. Raises UserError where a node is not like the driver's, or the cluster does
        not answer; Stopped after a signal, once the workers have saved their students."""
        ray = self._ray
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        desk = ray.remote(num_cpus=0, max_concurrency=1000)(Desk)
        self._desk = desk.options(scheduling_strategy=here).remote()
        self._gpus = gpus_of_worker(ray, self._asked, device)
        self._task = ray.remote(
            num_cpus=1,
            num_gpus=self._gpus,
            max_retries=0,
            max_calls=1,
            scheduling_strategy="SPREAD",
        )(worker)
        try:
            while self._start() or self._running:
                self._look()
        except ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self._address}: the cluster does not answer any more ({short(error)}); the"
                " same command goes on where it was"
            ) from None
        finally:
            self._end_all()

    def _start(self) -> bool:
        """Start runs while there is room; tell whether some wait for it."""
        nodes, places = rooms(self._ray, self._address, self._gpus)
        line = f"{counted(nodes, 'node')} with {counted(places, 'place')} for students"
        if line != self._line:
            self._execution.say(f"ray: {line}")
            self._line = line
        while len(self._running) < max(1, places):
            again = bool(self._again)
            run = self._again.pop(0) if again else self._execution.source.next()
            if run is None:
                return False
            if not again and self._execution.done_before(run):
                continue
            if not places:  # a node may join
                self._again.append(run)
                return True
            if run.state != "running":
                self._execution.begin(run)
            self._begun += 1
            key = run.number, self._begun
            work = Work(run.options, self._execution.tasks)
            self._running[self._task.remote(work, self._home, self._desk, key)] = run, key
        return False

    def _look(self) -> None:
        """Hear what workers tell, answer what they ask, and take those that have ended."""
        self._stop.check()
        self._hear()
        ready: list[Any] = []
        if self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=LOOK)
        else:
            time.sleep(LOOK)
        self._stop.check()
        if ready:
            self._hear()
        for each in ready:
            self._take(each)

    def _hear(self) -> None:
        runs = {key: run for run, key in self._running.values()}
        for key, what, *told in self._ray.get(self._desk.heard.remote()):
            if what == "say":
                self._execution.say(f"[{key[0]}] {told[0]}")
            elif key in runs:
                self._desk.answer.remote(key, self._execution.source.validated(runs[key], *told))

    def _take(self, ended: Any) -> None:
        """Take a run whose task has ended. Raises UserError for a node that is not like this."""
        run, _ = self._running.pop(ended)
        try:
            state, result, problem = self._ray.get(ended)
        except self._ray.exceptions.RayTaskError as error:
            state, result, problem = (
                "failed",
                {},
                f"its worker failed: {short(error.cause or error)}",
            )
        except self._ray.exceptions.RayError as error:
            self._died(run, error)
            return
        if state == "refused":
            raise UserError(f"a worker on {problem}")
        self._execution.end(run, state, result, problem)

    def _died(self, run: Run, error: Exception) -> None:
        """Do a run again whose worker or node has died, unless it dies of itself."""
        judged = len(validations(run.folder))
        deaths = [each for each in self._deaths.get(run.number, []) if each >= judged]
        self._deaths[run.number] = deaths = [*deaths, judged]
        why = f"its worker died ({short(error)})"
        if len(deaths) >= DEATHS:
            self._execution.end(run, "failed", {}, f"{why}, {DEATHS} times without getting further")
            return
        self._execution.say(f"[{run.number}] {why}; another one goes on")
        self._again.append(run)

    def _end_all(self) -> None:
        """Have the workers save their students. Those that ask are answered: none may hang."""
        with suppress(self._ray.exceptions.RayError):
            for each in self._running:
                self._ray.cancel(each)
            end = time.monotonic() + SAVING
            while self._running and time.monotonic() < end:
                for key, what, *_ in self._ray.get(self._desk.heard.remote()):
                    if what == "validated":
                        self._desk.answer.remote(key, "")
                ready, _ = self._ray.wait(list(self._running), timeout=LOOK)
                for each in ready:
                    del self._running[each]
