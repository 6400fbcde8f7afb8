"""Settings measured in turn, each time in a process of its own or all in this one."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor

Figures = dict[str, float]


def interleaved(
    settings: Mapping[str, Callable[[], Figures]], repeats: int, *, separate: bool = True
) -> dict[str, Figures]:
    """Return the medians of the figures of each setting.

    separate: run each in its own process; False runs all in this process, which saves the start of
    processes.

    Settings take turns, so that a busy machine affects all of them. A setting must be picklable
    (`functools.partial` of a function of a module).
    """
    runs: dict[str, list[Figures]] = {name: [] for name in settings}
    for turn in range(repeats):
        order = list(settings)[:: -1 if turn % 2 else 1]  # the first of a turn finds cold caches
        for name in order:
            runs[name].append(alone(settings[name]) if separate else settings[name]())
    return {
        name: {key: statistics.median(run[key] for run in figures) for key in figures[0]}
        for name, figures in runs.items()
    }


def alone(work: Callable[[], Figures]) -> Figures:
    """Call a function in a new process, whose memory has no other data."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work).result()


def peak_memory() -> float:
    """Return the peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
