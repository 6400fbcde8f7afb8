"""Settings run in turn, in separate processes. Each process imports this small module."""

import os
from functools import partial
from pathlib import Path

import pytest

from benchmarks.common.interleaved import interleaved, peak_memory


def found(number: float) -> dict[str, float]:
    return {"number": number, "process": float(os.getpid())}


def test_settings_run_in_processes_of_their_own() -> None:
    figures = interleaved({"one": partial(found, 1.0), "other": partial(found, 2.0)}, 1)
    assert [figures[name]["number"] for name in ("one", "other")] == [1.0, 2.0]
    assert len({os.getpid(), *(each["process"] for each in figures.values())}) == 3


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_is_in_megabytes() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    now = int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20
    assert 0.5 * now < peak_memory() < 100 * now
