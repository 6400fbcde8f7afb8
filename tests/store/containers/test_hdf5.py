"""Our reader of HDF5 files, without HDF5, and untrusted HDF5 files.

- Our reader of HDF5 files, without HDF5, returns the same data and reports the same damage.
- An untrusted HDF5 file that would crash or block HDF5, or link outside of itself, gives one line
  in every command.
"""

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.jenkins import jenkins_lookup3

from teachonce.feature_store.cli import main
from teachonce.store import StoreError, open_store
from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5 import objects
from teachonce.store.containers.hdf5.chunks import Hdf5Slices
from teachonce.store.containers.hdf5.file import append_digest, write_attributes
from teachonce.store.containers.hdf5.tree import FILE_ALTERED, Hdf5File, Hdf5Source
from teachonce.store.tools.verify import verify
from tests.integrity.damage import flip_in
from tests.integrity.forged_hdf5 import _anatomy, forge_block
from tests.making.stores import Copy, Made, copied

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
def test_any_rows_match_hdf5(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
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
def test_the_checksum_matches_hdf5(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
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
def test_any_tree_matches_hdf5(
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


IDS = "parts/0/token/id"


@pytest.fixture
def altered_copy(tmp_path: Path, small_store: Callable[[str], Path]) -> Copy:
    """Return a function that copies a store smaller than in other tests: every command reads it."""
    return lambda ext: copied(small_store(ext), tmp_path / f"copy.{ext}")


def alter(path: Path, name: str, old: bytes, new: bytes) -> None:
    """Replace bytes in the header of an object, and update the checksum and the SHA-256."""
    address, data = Hdf5File(str(path)).find(name).address, bytearray(path.read_bytes()[:-32])
    size, at = _anatomy(path)[0][address]
    block = bytes(data[address : address + size])
    assert block.count(old) == 1 and len(old) == len(new)
    plain = block[:at].replace(old, new)
    data[address : address + size] = plain + jenkins_lookup3(plain, 0).to_bytes(4, "little")
    path.write_bytes(data)
    append_digest(path)


def commands(path: Path) -> None:
    """Check that no command on a store ends with a traceback, or without a message."""
    for words in (("info",), ("show",), ("repair",), ("convert",)):
        more = {"show": ("0",), "convert": (str(path.with_name("copy.zarr")),)}.get(words[0], ())
        done = CliRunner().invoke(main, [*words, str(path), *more])
        assert isinstance(done.exception, SystemExit | None), done.exception
        assert done.exit_code in (0, 1) and done.output.strip()


def test_chunks_larger_than_their_array(tmp_path: Path) -> None:
    """Chunks larger than their array are refused: HDF5 divides by zero or reads out of bounds."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file.create_dataset("a", data=np.ones((671, 4), "f4"), chunks=(671, 4), fletcher32=True)
    path.write_bytes(path.read_bytes() + bytes(32))
    shape = (671).to_bytes(2, "little") + (4).to_bytes(2, "little") + (4).to_bytes(2, "little")
    for columns in (36868, 0, 5):
        other = shape[:2] + columns.to_bytes(2, "little") + shape[4:]
        alter(path, "a", shape, other)
        with pytest.raises(StoreError, match="chunks of shape .* do not fit shape"):
            Hdf5Source(str(path)).array("a")
        alter(path, "a", other, shape)
    assert (Hdf5Source(str(path)).array("a").read(0, 671) == 1).all()


@pytest.mark.parametrize("stored", [0, 3, 2**40])
def test_chunks_of_another_storage_size(altered_copy: Copy, stored: int) -> None:
    path = altered_copy("h5")
    with h5py.File(path) as file:
        chunk = file[IDS].id.get_chunk_info(0)
    rest = chunk.filter_mask.to_bytes(4, "little") + chunk.byte_offset.to_bytes(8, "little")
    alter(path, IDS, chunk.size.to_bytes(8, "little") + rest, stored.to_bytes(8, "little") + rest)
    with pytest.raises(StoreError, match="outside the file|declares|too few|checksum"):
        open_store(path)[0].token_ids  # noqa: B018
    assert any("token/id" in line for line in verify(path).problems)
    commands(path)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, place) for kind in ("pipe", "file", "soft", "loop") for place in (IDS, "more")),
        *(("file", "parts/0/token"), ("soft", "parts/0/more"), ("loop", "calibration")),
    ],
)
def test_links_are_followed_nowhere(
    tmp_path: Path, altered_copy: Copy, kind: str, place: str
) -> None:
    path, outside = altered_copy("h5"), tmp_path / "outside"
    outside.mkdir()
    os.mkfifo(outside / "pipe")
    with h5py.File(path, "r+") as file, h5py.File(outside / "file", "w") as other:
        other["secret/name"] = [1]
        links: dict[str, Any] = {
            "pipe": h5py.ExternalLink(str(outside / "pipe"), "/"),
            "file": h5py.ExternalLink(str(outside / "file"), "/secret"),
            "soft": h5py.SoftLink("/parts/1"),
            "loop": file["/"],
        }
        if place in file:
            del file[place]
        file[place] = links[kind]
    append_digest(path)
    try:
        lines = "\n".join(
            [*(odd.line for odd in verify(path).unknown_flaws), *verify(path).problems]
        )
    except StoreError as error:
        lines = str(error)
    assert place.rpartition("/")[2] in lines and "secret" not in lines
    commands(path)


def test_objects_that_go_in_circles(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file["a/b/c"] = [1]
        file["a/b/up"] = file["a"]
    with pytest.raises(StoreError, match="a/b/up is the same as a"):
        Hdf5Source(str(path)).arrays()
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file.create_group("/".join("x" * 99))
    with pytest.raises(StoreError, match="groups deep"):
        Hdf5Source(str(path)).arrays()


@pytest.mark.slow
def test_a_forged_block_is_refused_or_means_nothing(tmp_path: Path) -> None:
    """A forged block is refused or has no effect, also in heaps of large groups and attributes."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        for number in range(20):
            file.create_group(f"group{number}")
        file.attrs["large"] = np.bytes_(b"x" * 70_000)
        file.create_dataset("many", data=np.arange(3000), chunks=(1,), fletcher32=True)
    append_digest(path)
    whole = path.read_bytes()

    def read() -> tuple[Any, ...]:
        source = Hdf5Source(str(path))
        array = source.array("many")
        return source.members(""), source.attributes(), array.read(0, array.shape[0]).tobytes()

    sound, refused = read(), 0
    for number in range(150):
        forge_block(path, random.Random(number), tmp_path)
        try:
            read()
        except StoreError as error:
            refused += 1
            assert "\n" not in str(error)
        path.write_bytes(whole)
    assert refused > 50 and read() == sound


@pytest.mark.parametrize("value", [0.5, np.bytes_(b"{no JSON")])
def test_attributes_of_another_program_are_left_out(altered_copy: Copy, value: Any) -> None:
    path = altered_copy("h5")
    texts = [record.text for record in open_store(path)]
    with h5py.File(path, "r+") as file:
        file.attrs["more"] = value
    assert [record.text for record in open_store(path)] == texts
    assert verify(path).problems == [FILE_ALTERED]


def test_attributes_that_share_their_bytes_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total size of attributes is limited, also if they share the same bytes of a heap."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as written:
        for number in range(20):  # more than 8 are stored in a heap
            written.attrs[f"a{number}"] = np.bytes_(b"x" * 1000)
    append_digest(path)
    file = Hdf5File(str(path))
    root, _ = file.group("")
    assert len(objects.attributes(file.blocks, root)) == 20
    monkeypatch.setattr(objects, "MAX_HEAPED", 10_000)
    with pytest.raises(Damage, match="links or attributes take more than 10,000 bytes"):
        objects.attributes(file.blocks, root)
