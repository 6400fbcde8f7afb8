"""What is kept of an array is what it holds, is read once, and takes the room of its rows alone."""

from __future__ import annotations

import os
import resource
import signal
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.store.read.cached_arrays import Keeping, KeptSlices, Own
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.store.containers.shard_files import both, random_values, write

LENGTH = 101_001  # of rows of one byte, as maps have them
CHILDREN = get_context("fork")

Kept = Callable[[ShardSlices], KeptSlices]


@pytest.fixture(params=["own", "shared"])
def keep(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return in_folder(tmp_path if request.param == "shared" else None)


def in_folder(folder: Path | None) -> Kept:
    keeping = Keeping(lambda name: name == "a", folder)

    def kept(slices: ShardSlices) -> KeptSlices:
        assert keeping.of(slices, "b", "0" * 64) is slices
        found = keeping.of(slices, "a", "0" * 64)
        assert isinstance(found, KeptSlices)
        return found

    return kept


@pytest.fixture(scope="module")
def values() -> Array:
    return random_values("uint8", (LENGTH,), 0, 200)


@pytest.fixture(scope="module")
def slices(values: Array, tmp_path_factory: pytest.TempPathFactory) -> ShardSlices:
    ours, _ = both(write(tmp_path_factory.mktemp("kept") / "a.zarr", values, 6000, []))
    assert isinstance(ours, ShardSlices)
    return ours


def test_threads_get_the_rows_and_read_none_twice(
    values: Array, slices: ShardSlices, keep: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, times = keep(slices), np.zeros(LENGTH, int)
    real = ShardSlices.read_into

    def slow(self: ShardSlices, begin: int, end: int, out: Any) -> None:
        times[begin:end] += 1
        time.sleep(0.001)
        real(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", slow)

    def right(number: int) -> bool:
        rng = np.random.default_rng(number % 20)  # several ask for the same
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
        kept = KeptSlices(slices, Own(slices.shape, slices.dtype))
        kept.read(0, LENGTH)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert LENGTH < taken < 1.1 * LENGTH


def test_the_disk_is_asked_for_what_is_not_there(
    slices: ShardSlices, keep: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = keep(slices), list[tuple[int, int]]()
    monkeypatch.setattr(ShardSlices, "prefetch", lambda _, *rows: asked.append(rows))
    kept.read(10, 20)
    kept.prefetch(10, 30)
    kept.prefetch(10, 9000)
    assert asked == [(10, 9000)]


def in_a_process(work: Callable[[], object]) -> int | None:
    child = CHILDREN.Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


def test_what_a_process_unpacked_no_other_reads(
    values: Array, slices: ShardSlices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = in_folder(tmp_path)
    assert in_a_process(lambda: keep(slices).read(0, LENGTH)) == 0
    monkeypatch.setattr(ShardSlices, "read_into", None)
    kept = keep(slices)
    np.testing.assert_array_equal(kept.read(0, LENGTH), values)
    np.testing.assert_array_equal(kept.read(50, 99), values[50:99])


def test_a_reader_killed_amid_rows_leaves_none(
    values: Array, slices: ShardSlices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, real = in_folder(tmp_path), ShardSlices.read_into

    def killed(self: ShardSlices, begin: int, end: int, out: Any) -> None:
        if begin:
            out[: (end - begin) // 2] = 1
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, begin, end, out)

    def work() -> None:
        kept = keep(slices)
        kept.read(0, 10)
        kept.read(0, LENGTH)

    monkeypatch.setattr(ShardSlices, "read_into", killed)
    assert in_a_process(work) == -signal.SIGKILL
    monkeypatch.setattr(ShardSlices, "read_into", real)
    np.testing.assert_array_equal(keep(slices).read(0, LENGTH), values)


def test_no_room(slices: ShardSlices, tmp_path: Path) -> None:
    """Room is reserved before a row is written: a map into a full disk ends the process."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(UserError, match=f"--cache shared:{tmp_path}: no room .* too large"):
            in_folder(tmp_path)(slices)

    assert in_a_process(work) == 0
