"""Our reader of HDF5 files, without HDF5, returns the same data and reports the same damage."""

from __future__ import annotations

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

from teachonce.store import StoreError, open_store
from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5.chunks import Hdf5Slices
from teachonce.store.containers.hdf5.file import write_attributes
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.tools.verify import verify
from tests.integrity.damage import flip_in

Made = Callable[..., Any]
PACKINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checksum": {"fletcher32": True},
    "lz4": {"fletcher32": True, **hdf5plugin.Blosc("lz4", 1, hdf5plugin.Blosc.BITSHUFFLE)},
    "zstd": {"fletcher32": True, **hdf5plugin.Blosc("zstd", 1, hdf5plugin.Blosc.NOSHUFFLE)},
    "no checksum": dict(hdf5plugin.Blosc("lz4", 1, hdf5plugin.Blosc.SHUFFLE)),
}


VERSIONS = ("v108", "v110", ("v110", "v110"), "latest")


@settings(max_examples=25, deadline=None)
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
    chunk = min(rows, length), draw(st.integers(1, width))
    with h5py.File(path, "w", libver=draw(st.sampled_from(VERSIONS))) as file:
        file.create_dataset("a", data=values, chunks=chunk, **packing)
        file["whole"] = values
    source = Hdf5Source(str(path))
    array, whole = source.array("a"), source.array("whole")
    assert (array.dtype, array.shape) == (whole.dtype, whole.shape) == (values.dtype, values.shape)
    for _ in range(3):
        begin, end = sorted(draw(st.integers(0, length)) for _ in range(2))
        out = np.full((end - begin, width), 1, dtype)
        array.read_into(begin, end, out)
        assert out.tobytes() == values[begin:end].tobytes()
        assert whole.read(begin, end).tobytes() == values[begin:end].tobytes()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=1, max_size=3000))
def test_the_checksum_is_that_of_hdf5(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path, values = tmp_path_factory.getbasetemp() / "sum.h5", np.frombuffer(data, np.uint8)
    for each in (values, values * 0, values * 0 + 255, np.resize(values, 2**20 + 77)):
        with h5py.File(path, "w", libver="v110") as file:
            file.create_dataset("a", data=each, chunks=each.shape, fletcher32=True)
        with h5py.File(path) as file:
            stored = file["a"].id.read_direct_chunk((0,))[1]
        slices = Hdf5Source(str(path)).array("a")
        assert isinstance(slices, Hdf5Slices)
        dataset = slices.dataset
        decoded, whole = np.empty_like(each), np.frombuffer(stored, np.uint8)
        dataset.check_sum(0, whole)
        dataset.decode(0, whole, 0, len(each), decoded)
        assert (decoded == each).all()
        flipped = whole.copy()
        flipped[0] ^= 1
        with pytest.raises(Damage, match="does not match its checksum"):
            dataset.check_sum(0, flipped)
        for short in (whole[:0], whole[:3], whole[:-1]):
            with pytest.raises(Damage):
                dataset.check_sum(0, short)
                dataset.decode(0, short, 0, len(each), decoded)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_tree_is_that_of_hdf5(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any tree is read as HDF5 reads it: links and attributes in headers, or in deep heaps."""
    draw = data.draw
    path = tmp_path_factory.getbasetemp() / "tree.h5"
    names = [
        f"{n}é" * draw(st.integers(1, 9)) for n in range(draw(st.sampled_from([0, 8, 9, 900])))
    ]
    texts = {f"key{n}": "x" * draw(st.sampled_from([0, 1, 5000, 70_000])) for n in range(9)}
    texts = dict(list(texts.items())[: draw(st.integers(0, 9))])
    with h5py.File(path, "w", libver=draw(st.sampled_from([("v110", "v110"), "latest"]))) as file:
        group = file.create_group("a/b")
        for name in names:
            group.create_group(name)
        for name in names[:: draw(st.integers(2, 5))]:
            del group[name]
        write_attributes(group, texts | {"number": -5})
        expected = sorted(group)
    source = Hdf5Source(str(path))
    assert source.members("a/b") == expected
    assert source.attributes("a/b") == texts | {"number": -5}
    assert source.attributes("a") == {} and source.members("a") == ["b"]


def test_other_layouts(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="v110") as file:
        file["whole"] = np.arange(10)
        file["none"] = np.empty((0, 3), np.float32)
        file.create_dataset("columns", data=np.eye(8), chunks=(4, 4))
        file.create_dataset("pages", data=np.arange(5000), chunks=(1,), fletcher32=True)
        file.create_dataset("gone", (9,), "i4", chunks=(3,))
        file.create_dataset("grows", data=np.arange(9), chunks=(3,), maxshape=(None,))
    source = Hdf5Source(str(tmp_path / "a.h5"))
    assert (source.array("columns").read(0, 8) == np.eye(8)).all()
    assert (source.array("whole").read(2, 5) == [2, 3, 4]).all()
    assert source.array("none").read(0, 9).shape == (0, 3)
    assert (source.array("pages").read(1000, 3000) == np.arange(1000, 3000)).all()
    for name, words in (("gone", "chunk 0 is missing"), ("grows", "may grow")):
        with pytest.raises(StoreError, match=words):
            source.array(name).read(0, 9)


def test_what_hdf5_finds_is_found(copy: Callable[..., Path]) -> None:
    path = copy("h5")
    names = ["parts/0/token/id", "parts/1/view0/hidden/mean/values", "parts/2/text/utf8"]
    for damaged in (0, 1, 3):
        for name in names[:damaged]:
            flip_in(path, name, 20)
        found = verify(path).problems
        lines = [line for line in found if line.startswith("part ")]
        assert len(found) == damaged + bool(damaged)  # the SHA-256 of the file differs as well
        for name, line in zip(names[:damaged], lines, strict=True):
            with h5py.File(path) as file, pytest.raises(OSError):
                file[name][...]
            _, part, array = name.split("/", 2)
            assert line.startswith(f"part {part}: array {array} cannot be read (chunk 0)")
            assert "does not match its checksum" in line
        for name in names[:damaged]:
            flip_in(path, name, 20)


def test_threads_read_one_array_at_once(made: Made) -> None:
    store = open_store(made("h5")[0])
    array = store.part(0).array("view0/hidden/mean/values")
    expected = array.read(0, array.shape[0])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: array.read(0, array.shape[0]), range(64)))
    assert all((values == expected).all() for values in found)
