"""Dumps one store with the workers of a Ray cluster.

Each worker is a process of `sharing`, with the same queue and leases: Ray only starts it. The
driver is the process of the typed command. It runs as many workers as the nodes have room for, so a
node may join late or die. If the driver dies, Ray ends its workers, and another driver continues.
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
from teachonce.support.errors import UserError, os_error_line
from teachonce.support.lease import Lease, Taken
from teachonce.support.packages import library
from teachonce.support.ray_cluster import (
    DriverNode,
    cluster,
    gpus_of_worker,
    remote_worker,
    short,
    worker_capacity,
)
from teachonce.support.signals import Stop, stoppable
from teachonce.teacher_dump.job.dump import check_existing, written_line
from teachonce.teacher_dump.job.growing import Growth
from teachonce.teacher_dump.job.inputs import check_inputs, settings_lines
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.sharing import ProcessSummary, share

LOOK = 0.5  # seconds between looks at the nodes and at workers that have ended
REPORT = 30.0  # seconds between lines of progress
SEALED = 120.0  # seconds that the worker that sealed the store may take to report
# The driver gives up after this number of consecutive deaths of workers without a new part, plus
# two for each worker that the cluster can run.
DEATHS = 10


@dataclass(frozen=True)
class WorkerJob:
    """Holds a worker's arguments: the options of the dump, and the driver's folder and lease."""

    options: DumpOptions
    home: DriverNode


def driver_path(out: Path) -> Path:
    """Return the path whose lease the driver of a store holds, so that a store has at most one
    driver."""
    return out.with_name(f"{out.name}.ray")


def worker(job: WorkerJob, shard: ProcessShard) -> ProcessSummary | str:
    """Write parts until the store is finished. Return the report of this process, or the message of
    an error, which names the node."""
    # Errors are returned as text: Ray would wrap an exception in a RayTaskError, as it does a bug.
    try:
        job.home.enter()
        return share(job.options, shard)
    except UserError as error:
        return f"{socket.gethostname()}: {error}"
    except OSError as error:
        return f"{socket.gethostname()}: {os_error_line(error)}"


def share_on_ray(
    options: DumpOptions, say: Callable[[str], object] = lambda line: None
) -> tuple[ProcessSummary, int]:
    """Create or continue a store with the workers of the cluster `options.ray`.

    Returns the report of the worker that sealed the store, and the number of parts that existed
    before. Raises UserError for bad input, in the driver or in a worker, and if the cluster cannot
    be reached; Stopped like `dump`.
    """
    assert options.ray is not None
    ray = library("ray", "ray", "--ray")
    with stoppable(lambda: written_line(options.out)) as stop:
        check_existing(options, shared=True)
        check_inputs(options)
        with Growth.of(options):
            pass  # a store that cannot be opened is reported here, not by each worker
        # Not `resolved`: each worker resolves `auto` on its own node.
        say(settings_lines(options, bool(options.corpus)))
        out = Path(options.out)  # a bucket is refused by the options
        with closing(_only_driver(out)) as lease, cluster(ray, options.ray, stop):
            job = WorkerJob(options, DriverNode.here(driver_path(out), lease))
            before = _published(out)
            return _Driver(ray, job, say, stop).run(), before


def _only_driver(out: Path) -> Lease:
    try:
        return Lease(driver_path(out))
    except Taken as error:
        raise UserError(f"{out}: another `teacher-dump --ray` is writing it: {error}") from None


def _published(out: Path) -> int:
    return 0 if StoreWriter.peek(out) is None else StoreWriter.published_counts(out)[0]


class _Driver:
    """Starts workers, and replaces those that died, until the store is finished."""

    def __init__(self, ray: Any, job: WorkerJob, say: Callable[[str], object], stop: Stop) -> None:
        self._ray, self._job, self._say, self._stop = ray, job, say, stop
        self._gpus = gpus_of_worker(ray, job.options.ray_gpus, job.options.device)
        self._worker = remote_worker(ray, worker, self._gpus)
        self._running: list[Any] = []
        self._started = self._deaths = self._parts = 0
        self._reported, self._line = -math.inf, ""

    def run(self) -> ProcessSummary:
        """Run workers until one has sealed the store; return its report. Raises UserError if the
        cluster no longer responds."""
        done: list[ProcessSummary] = []
        try:
            while not done:
                self._start()
                done = self._ended()
            end = time.monotonic() + SEALED
            # Workers that only found the store finished may report before the one that sealed it.
            while self._running and not any(summary.store for summary in done):
                done += self._ended()
                if time.monotonic() > end:
                    break
        except self._ray.exceptions.RayError as error:
            raise UserError(
                f"--ray {self._job.options.ray}: the cluster no longer responds ({short(error)});"
                " run the same command to continue"
            ) from None
        return next((summary for summary in done if summary.store), done[0])

    def _start(self) -> None:
        """Start a worker for each free place of the cluster, and one more that waits for a node to
        join."""
        assert self._job.options.ray is not None
        nodes, places = worker_capacity(self._ray, self._job.options.ray, self._gpus)
        self._report(f"{counted(nodes, 'node')} with {counted(places, 'place')} for workers")
        self._limit = DEATHS + 2 * places
        while len(self._running) < places + 1:
            # The place is only a preference (`PartQueue.take`): two workers may have the same.
            shard = ProcessShard(self._started % (places or 1), places or 1)
            self._running.append(self._worker.remote(self._job, shard))
            self._started += 1

    def _report(self, line: str) -> None:
        """Print a line if it changed, or if the last one is REPORT seconds old."""
        late = time.monotonic() - self._reported > REPORT
        if line != self._line or late:
            parts = _published(Path(self._job.options.out))
            self._say(f"ray: {line}; {counted(parts, 'part')} published")
            self._reported, self._line = time.monotonic(), line

    def _ended(self) -> list[ProcessSummary]:
        """Return the reports of workers that ended because the store is finished."""
        self._stop.check()
        ready, self._running = self._ray.wait(self._running, timeout=LOOK)
        self._stop.check()
        summaries = (self._result(ref) for ref in ready)
        return [summary for summary in summaries if summary is not None]

    def _result(self, ended: Any) -> ProcessSummary | None:
        """Return the report of a worker that ended; None if it died.

        Raises UserError if it refused its input, or failed by a bug.
        """
        try:
            report: ProcessSummary | str = self._ray.get(ended)
        # Before RayError, its base class: an exception in a worker is not a death to recover from.
        except self._ray.exceptions.RayTaskError as error:
            raise UserError(
                f"{self._job.options.out}: a worker failed: {short(error.cause or error)}; its"
                " log is in the folder of Ray's session (/tmp/ray/session_latest/logs)"
            ) from None
        except self._ray.exceptions.RayError as error:
            self._died(error)
            return None
        if isinstance(report, str):
            raise UserError(f"a worker on {report}")
        return report

    def _died(self, error: Exception) -> None:
        """Count a death. Raises UserError if too many workers died since the last new part."""
        parts = _published(Path(self._job.options.out))
        # Any new part resets the count: a cluster may lose many nodes during a long dump.
        self._deaths = 1 if parts > self._parts else self._deaths + 1
        self._parts = max(parts, self._parts)
        if self._deaths > self._limit:
            raise UserError(
                f"{self._job.options.out}: {self._deaths} workers died in a row and no part was"
                f" written ({short(error)}); give each worker more memory, then run the same"
                " command to continue"
            )
