"""Settings in turn, in processes of their own. Each imports this module, which is light."""

from __future__ import annotations

import os
from functools import partial

from benchmarks.common.interleaved import interleaved, peak_memory


def found(number: float) -> dict[str, float]:
    return {"number": number, "process": float(os.getpid())}


def test_settings_run_in_processes_of_their_own() -> None:
    figures = interleaved({"one": partial(found, 1.0), "other": partial(found, 2.0)}, 1)
    assert [figures[name]["number"] for name in ("one", "other")] == [1.0, 2.0]
    assert len({os.getpid(), *(each["process"] for each in figures.values())}) == 3


def test_memory_is_in_megabytes() -> None:
    assert 10 < peak_memory() < 10**6
