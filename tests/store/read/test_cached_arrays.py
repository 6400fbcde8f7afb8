"""A cached array equals the stored one, is read once, and takes the memory of its rows alone."""

from __future__ import annotations

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.store.read.part import CachedSlices
from teachonce.support.arrays import Array
from tests.store.containers.shard_files import both, random_values, write

LENGTH = 101_001  # with rows of one byte, as in maps


@pytest.fixture(scope="module")
def values() -> Array:
    return random_values("uint8", (LENGTH,), 0, 200)


@pytest.fixture(scope="module")
def slices(values: Array, tmp_path_factory: pytest.TempPathFactory) -> ShardSlices:
    ours, _ = both(write(tmp_path_factory.mktemp("kept") / "a.zarr", values, 6000, []))
    assert isinstance(ours, ShardSlices)
    return ours


def test_threads_get_the_rows_and_read_none_twice(
    values: Array, slices: ShardSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, times = CachedSlices(slices), np.zeros(LENGTH, int)
    real = ShardSlices.read_into

    def slow(self: ShardSlices, begin: int, end: int, out: Any) -> None:
        times[begin:end] += 1
        time.sleep(0.001)
        real(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", slow)

    def right(number: int) -> bool:
        rng = np.random.default_rng(number % 20)  # several request the same rows
        begin = int(rng.integers(LENGTH // 2))
        end = begin + int(rng.integers(LENGTH // 4))
        view, out = kept.read(begin, end), np.empty(end - begin, np.uint8)
        kept.read_into(begin, end, out)
        return np.array_equal(view, values[begin:end]) and np.array_equal(out, view)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(right, range(60)))
    assert times.max() == 1 and times[0] == 0 == times[-1]
    np.testing.assert_array_equal(kept.read(LENGTH - 5, LENGTH + 5), values[-5:])
    np.testing.assert_array_equal(kept.read(0, LENGTH), values)
    assert times.min() == times.max() == 1 and not kept.read(7, 7).size


def test_the_room_that_it_takes(slices: ShardSlices) -> None:
    tracemalloc.start()
    try:
        kept = CachedSlices(slices)
        kept.read(0, LENGTH)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert LENGTH < taken < 1.1 * LENGTH


def test_the_disk_is_asked_for_what_is_not_there(
    slices: ShardSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = CachedSlices(slices), list[tuple[int, int]]()
    monkeypatch.setattr(ShardSlices, "prefetch", lambda _, *rows: asked.append(rows))
    kept.read(10, 20)
    kept.prefetch(10, 30)
    kept.prefetch(10, 9000)
    assert asked == [(10, 9000)]
