"""Chunks of HDF5 that we decode ourselves are what HDF5 decodes, and damage is told as it tells."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.integrity.damage import flip
from store import open_store
from store.containers.blosc import Damage
from store.containers.hdf5 import tree
from store.containers.hdf5.chunks import Chunks
from store.containers.hdf5.tree import Hdf5Source
from store.tools.verify import verify

Made = Callable[..., Any]
PACKINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checksum": {"fletcher32": True},
    "lz4": {"fletcher32": True, **hdf5plugin.Blosc("lz4", 1, hdf5plugin.Blosc.BITSHUFFLE)},
    "zstd": {"fletcher32": True, **hdf5plugin.Blosc("zstd", 1, hdf5plugin.Blosc.NOSHUFFLE)},
    "no checksum": dict(hdf5plugin.Blosc("lz4", 1, hdf5plugin.Blosc.SHUFFLE)),
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small reads, too."""
    monkeypatch.setattr(tree, "LARGE", 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows_are_those_of_hdf5(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(["bool", "int8", "uint16", "int32", "int64", "float16"]))
    length, rows, width = (draw(st.integers(1, top)) for top in (500, 200, 9))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = rng.integers(0, draw(st.sampled_from([1, 2, 100])), (length, width)).astype(dtype)
    path = tmp_path_factory.getbasetemp() / "any.h5"
    packing = PACKINGS[draw(st.sampled_from(list(PACKINGS)))]
    rows = min(rows, length)
    with h5py.File(path, "w") as file:
        file.attrs["state"] = "sealed"
        file.create_dataset("a", data=values, chunks=(rows, width), **packing)
    slices: Any = Hdf5Source(str(path)).array("a")
    for _ in range(3):
        begin = draw(st.integers(0, (length - 1) // rows)) * rows
        end = draw(st.sampled_from([min(begin + rows, length), length]))
        out = np.full((end - begin, width), 1, dtype)
        assert slices._decoded(begin, end, out)
        assert out.tobytes() == values[begin:end].tobytes()
        assert out.tobytes() == slices.read(begin, end).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=3000))
def test_the_checksum_is_that_of_hdf5(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path, values = tmp_path_factory.getbasetemp() / "sum.h5", np.frombuffer(data, np.uint8)
    for each in (values, values * 0, values * 0 + 255, np.resize(values, 2**20 + 77)):
        with h5py.File(path, "w") as file:
            made = file.create_dataset("a", data=each, chunks=each.shape, fletcher32=True)
            stored = made.id.read_direct_chunk((0,))[1]
            chunks = Chunks.of(made)
        assert chunks is not None
        decoded, whole = np.empty_like(each), np.frombuffer(stored, np.uint8)
        chunks.decode(0, whole, decoded)
        assert (decoded == each).all()
        flipped = whole.copy()
        flipped[0] ^= 1
        with pytest.raises(Damage, match="does not match its checksum"):
            chunks.decode(0, flipped, decoded)
        for short in (whole[:0], whole[:3], whole[:-1]):
            with pytest.raises(Damage):
                chunks.decode(0, short, decoded)


def test_what_is_left_to_hdf5(tmp_path: Path, always: None) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["state"] = "sealed"
        file["whole"] = np.arange(10)
        file.create_dataset("columns", data=np.eye(8), chunks=(4, 4))
        file.create_dataset("rows", data=np.arange(40), chunks=(16,))
        assert Chunks.of(file["whole"]) is Chunks.of(file["columns"]) is None
    source = Hdf5Source(str(tmp_path / "a.h5"))
    rows: Any = source.array("rows")
    for begin, end in ((3, 16), (0, 17), (16, 39)):
        assert not rows._decoded(begin, end, np.empty(end - begin, np.int64))
        assert (rows.read(begin, end) == np.arange(begin, end)).all()
    assert (source.array("columns").read(0, 8) == np.eye(8)).all()
    assert (source.array("whole").read(2, 5) == [2, 3, 4]).all()


def test_threads_find_what_hdf5_finds(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reports of a sound and of damaged stores are the same, line by line."""
    path = tmp_path / "a.h5"
    shutil.copy(made("h5")[0], path)
    with h5py.File(path) as file:
        names = ["parts/0/token/id", "parts/1/view0/hidden/mean/values", "parts/2/text/utf8"]
        places = [file[name].id.get_chunk_info(0).byte_offset for name in names]
    for damaged in (0, 1, 3):
        for place in places[:damaged]:
            flip(path, place + 20, 3)
        reports = []
        for large in (2**60, 1):
            monkeypatch.setattr(tree, "LARGE", large)
            reports.append(verify(path))
        assert reports[0] == reports[1] and (damaged > 0) == bool(reports[1].problems)
        for place in places[:damaged]:
            flip(path, place + 20, 3)


def test_threads_read_one_array_at_once(made: Made, always: None) -> None:
    store = open_store(made("h5")[0])
    array = store.part(0).array("view0/hidden/mean/values")
    expected = array.read(0, array.shape[0])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: array.read(0, array.shape[0]), range(64)))
    assert all((values == expected).all() for values in found)
