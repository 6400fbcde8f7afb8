"""Execute the runs of a sweep on a Ray cluster: one Ray task per student, with a share of a GPU.

The driver (the process of the command) starts runs while nodes have places. It alone writes
runs.json. The students are in the sweep's folder, on a disk that all nodes share: if a worker or
its node dies, another task resumes from the student's checkpoint. If the driver dies, Ray ends its
workers; the same command, typed again, continues the sweep.
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

from teachonce.student_train.sweep.execution import Event, Say, Work, error_line, finish
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import BEAT, MISSED, Taken, check_free
from teachonce.support.ray_cluster import DriverNode, remote_worker, short, worker_capacity
from teachonce.support.signals import Stop

POLL = 0.5  # seconds between polls of the workers and of the nodes
SAVING = 60.0  # seconds for workers to save their students after a stop

Key = tuple[int, int]
"""Number of a run, and number of the worker among all that were started."""


class Mailbox:
    """Passes events from the workers to the driver, and the driver's answers back, as a Ray
    actor."""

    def __init__(self) -> None:
        self._reports = list[tuple[Any, ...]]()
        self._answers = dict[Key, str]()
        self._changed = threading.Condition()

    def say(self, key: Key, line: str) -> None:
        with self._changed:
            self._reports.append((key, "say", line))

    def validated(self, key: Key, step: int, figures: Mapping[str, float]) -> str:
        """Report a validation, and wait for the answer: the reason why the run ends here, or "" to
        continue."""
        with self._changed:
            self._reports.append((key, "validated", step, dict(figures)))
            self._changed.wait_for(lambda: key in self._answers)
            return self._answers.pop(key)

    def reports(self) -> list[tuple[Any, ...]]:
        """Return all reports since the last call."""
        with self._changed:
            reports, self._reports = self._reports, []
            return reports

    def answer(self, key: Key, why: str) -> None:
        with self._changed:
            self._answers[key] = why
            self._changed.notify_all()


def worker(work: Work, home: DriverNode, mailbox: Any, key: Key) -> tuple[str, Any, str]:
    """Train and score a student; return the state of the run, its result and its problem.

    If this node differs from the driver's, the state is `refused`.
    """
    import ray

    def end_reason(step: int, figures: dict[str, float]) -> str:
        return str(ray.get(mailbox.validated.remote(key, step, figures)))

    host = socket.gethostname()
    try:
        home.enter()
    except (UserError, OSError) as error:
        return "refused", {}, f"{host}: {error_line(error)}"
    try:
        from teachonce.student_train.output.run import open_stores

        _wait_until_free(work.options.out_folder())
        work = replace(work, options=work.options.resolved())
        with open_stores(work.options) as stores:
            return finish(
                work, stores, None, end_reason, lambda line: mailbox.say.remote(key, line)
            )
    except Exception as error:  # the other students are trained all the same
        return "failed", {}, f"on {host}: {error_line(error)}"


def _wait_until_free(out: Path) -> None:
    """Wait until no other process writes the student. Raises Taken if its writer is alive."""
    # A writer on another machine counts as dead only after MISSED beats without a sign.
    end = time.monotonic() + BEAT * (MISSED + 1)
    while True:
        try:
            return check_free(out)
        except Taken:
            if time.monotonic() > end:
                raise
        time.sleep(1)


class RayWorkers:
    """Runs workers as Ray tasks, one for each student that the nodes have room for."""

    deaths = 3

    def __init__(
        self, ray: Any, address: str, gpus: float, home: DriverNode, stop: Stop, say: Say
    ) -> None:
        """Use a cluster to which this process is connected. gpus: GPUs per student."""
        self._ray, self._address, self._gpus = ray, address, gpus
        self._home, self._stop, self._say = home, stop, say
        self._running = dict[Any, Key]()
        self._started, self._line = 0, ""
        # On the driver's node: a mailbox that is lost with another node would end the sweep.
        on_driver = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        # Each worker that waits for an answer takes one of these threads. The mailbox needs no
        # processor.
        mailbox = ray.remote(num_cpus=0, max_concurrency=1000)(Mailbox)
        self._mailbox = mailbox.options(scheduling_strategy=on_driver).remote()
        self._task = remote_worker(ray, worker, gpus)

    def places(self) -> int:
        nodes, places = worker_capacity(self._ray, self._address, self._gpus)
        line = f"{counted(nodes, 'node')} with {counted(places, 'place')} for students"
        if line != self._line:
            self._say(f"ray: {line}")
            self._line = line
        return places

    def start(self, number: int, work: Work) -> None:
        self._started += 1
        key = number, self._started
        self._running[self._task.remote(work, self._home, self._mailbox, key)] = key

    def events(self) -> list[Event]:
        """Wait for events as `Workers.events` does. Raises UserError for a node that differs from
        the driver's; Stopped after a signal."""
        self._stop.check()
        events, ready = self._sent(), list[Any]()
        if self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=POLL)
        self._stop.check()
        if ready:
            # Fetched again, because after this call `_sent` drops the reports of workers that have
            # ended.
            events += self._sent()
        return [*events, *map(self._ended, ready)]

    def _sent(self) -> list[Event]:
        """Return the reports of workers that are still running."""
        alive = self._running.values()
        reports = self._ray.get(self._mailbox.reports.remote())
        # A worker that was taken for dead may have reported before it ended.
        return [(key[0], *event) for key, *event in reports if key in alive]

    def _ended(self, task: Any) -> Event:
        number, _ = self._running.pop(task)
        try:
            state, result, problem = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            problem = f"its worker failed: {short(error.cause or error)}"
            return number, "ended", "failed", {}, problem
        except self._ray.exceptions.RayError as error:
            return number, "died", f"its worker died ({short(error)})"
        if state == "refused":
            raise UserError(f"a worker on {problem}")
        return number, "ended", state, result, problem

    def answer(self, number: int, why: str) -> None:
        for key in self._running.values():
            if key[0] == number:
                self._mailbox.answer.remote(key, why)

    def stop(self) -> None:
        """Make the workers save their students and exit."""
        # Validations are still answered: a worker that waits for an answer could not save.
        with suppress(self._ray.exceptions.RayError):
            for task in self._running:
                # Ray interrupts the worker as Ctrl-C does.
                self._ray.cancel(task)
            end = time.monotonic() + SAVING
            while self._running and time.monotonic() < end:
                for number, kind, *_ in self._sent():
                    if kind == "validated":
                        self.answer(number, "")
                ready, _ = self._ray.wait(list(self._running), timeout=POLL)
                for task in ready:
                    del self._running[task]
