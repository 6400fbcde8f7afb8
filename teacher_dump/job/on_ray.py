"""One store made by the workers of a Ray cluster.

Each worker is a process of `sharing`, with the same queue and leases: Ray only starts it. The
driver, which typed the command, keeps as many workers running as the nodes have room for, so that
a node may join late or die. If the driver dies, Ray ends its workers, and another driver goes on.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.store import StoreWriter
from teachonce.support.console import counted
from teachonce.support.errors import UserError, of_path
from teachonce.support.extras import library
from teachonce.support.lease import Lease, Taken
from teachonce.support.ray_cluster import (
    Home,
    cluster,
    gpus_of_worker,
    remote_worker,
    rooms,
    short,
)
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.job.dump import check_begun, kept
from teachonce.teacher_dump.job.growing import Growth
from teachonce.teacher_dump.job.options import DumpOptions, Shard
from teachonce.teacher_dump.job.plan import check_inputs, settings_lines
from teachonce.teacher_dump.job.sharing import Shared, share

LOOK = 0.5  # seconds between looks at the nodes and at workers that have ended
REPORT = 30.0  # seconds between lines of progress
SEALED = 120.0  # seconds that the worker that sealed the store may take to report
DEATHS = 10  # of workers in a row, and two for each place, without a new part: a reason to give up


@dataclass(frozen=True)
class Task:
    """What a worker needs: the options of the dump, and the home of the driver."""

    options: DumpOptions
    home: Home


def driven(out: Path) -> Path:
    """The path whose lease the driver of a store holds, so that there is one at a time."""
    return out.with_name(f"{out.name}.ray")


def worker(task: Task, shard: Shard) -> Shared | str:
    """Make parts until the store is finished; or return a line with what is wrong on its node."""
    try:
        task.home.enter()
        return share(task.options, shard)
    except UserError as error:
        return f"{socket.gethostname()}: {error}"
    except OSError as error:
        return f"{socket.gethostname()}: {of_path(error)}"


def share_on_ray(
    options: DumpOptions, say: Callable[[str], object] = lambda line: None
) -> tuple[Shared, int]:
    """Make a store, or go on with it, with the workers of the cluster `options.ray`.

    Returns what the worker reports that has sealed it, and how many parts had been there before.
    Raises UserError for bad input, of the driver or of a worker, and where there is no such
    cluster; Stopped as `dump` does.
    """
    assert options.ray is not None
    ray = library("ray", "ray", "--ray")
    with stoppable(lambda: kept(options.out)) as stop:
        check_begun(options, shared=True)
        check_inputs(options)
        with Growth.of(options):
            pass  # it can be opened
        say(settings_lines(options, bool(options.corpus)))
        out = Path(options.out)  # a bucket is refused by the options
        with closing(_only_driver(out)) as lease, cluster(ray, options.ray, stop):
            task = Task(options, Home.here(driven(out), lease))
            before = _published(out)
            return _Driver(ray, task, say, stop).run(), before


def _only_driver(out: Path) -> Lease:
    try:
        return Lease(driven(out))
    except Taken as error:
        raise UserError(f"{out}: another `teacher-dump --ray` makes it already: {error}") from None


def _published(out: Path) -> int:
    return 0 if StoreWriter.peek(out) is None else StoreWriter.published_counts(out)[0]


class _Driver:
    """Keeps workers running until the store is finished."""

    def __init__(self, ray: Any, task: Task, say: Callable[[str], object], stop: Stop) -> None:
        self._ray, self._task, self._say, self._stop = ray, task, say, stop
        self._gpus = gpus_of_worker(ray, task.options.ray_gpus, task.options.device)
        self._worker = remote_worker(ray, worker, self._gpus)
        self._running: list[Any] = []
        self._begun = self._deaths = self._parts = 0
        self._reported, self._line = -math.inf, ""

    def run(self) -> Shared:
        """Return what the worker reports that has sealed the store."""
        done: list[Shared] = []
        try:
            while not done:
                self._start()
                done = self._ended()
            end = time.monotonic() + SEALED
            while self._running and not any(each.store for each in done):
                done += self._ended()
                if time.monotonic() > end:
                    break
        except self._ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self._task.options.ray}: the cluster does not answer any more"
                f" ({short(error)}); the same command goes on where it was"
            ) from None
        return next((each for each in done if each.store), done[0])

    def _start(self) -> None:
        """Start workers for all places, and one that waits for a node to join."""
        assert self._task.options.ray is not None
        nodes, places = rooms(self._ray, self._task.options.ray, self._gpus)
        self._tell(f"{counted(nodes, 'node')} with {counted(places, 'place')} for workers")
        self._limit = DEATHS + 2 * places
        while len(self._running) < places + 1:
            shard = Shard(self._begun % (places or 1), places or 1)
            self._running.append(self._worker.remote(self._task, shard))
            self._begun += 1

    def _tell(self, line: str) -> None:
        """Say what has changed, or how far it is."""
        late = time.monotonic() - self._reported > REPORT
        if line != self._line or late:
            parts = _published(Path(self._task.options.out))
            self._say(f"ray: {line}; {counted(parts, 'part')} published")
            self._reported, self._line = time.monotonic(), line

    def _ended(self) -> list[Shared]:
        """Return what workers report that have ended, for the store is finished."""
        self._stop.check()
        ready, self._running = self._ray.wait(self._running, timeout=LOOK)
        self._stop.check()
        found = (self._result(each) for each in ready)
        return [each for each in found if each is not None]

    def _result(self, ended: Any) -> Shared | None:
        """Return what a worker reports; None where it has died.

        Raises UserError for what it refused, or for a bug.
        """
        try:
            found: Shared | str = self._ray.get(ended)
        except self._ray.exceptions.RayTaskError as error:
            raise UserError(
                f"{self._task.options.out}: a worker failed: {short(error.cause or error)}; its"
                " log is in the folder of Ray's session (/tmp/ray/session_latest/logs)"
            ) from None
        except self._ray.exceptions.RayError as error:
            self._died(error)
            return None
        if isinstance(found, str):
            raise UserError(f"a worker on {found}")
        return found

    def _died(self, error: Exception) -> None:
        """Count a death. Raises UserError where workers die and nothing is made any more."""
        parts = _published(Path(self._task.options.out))
        self._deaths = 1 if parts > self._parts else self._deaths + 1
        self._parts = max(parts, self._parts)
        if self._deaths > self._limit:
            raise UserError(
                f"{self._task.options.out}: {self._deaths} workers died one after the other and no"
                f" part was made ({short(error)}); give each more memory, the same command goes on"
            )
