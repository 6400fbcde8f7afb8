"""An untrusted HDF5 file that would crash or block HDF5, or link outside of itself, gives one line
in every command."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from numcodecs.jenkins import jenkins_lookup3

from teachonce.feature_store.cli import main
from teachonce.store import StoreError, open_store
from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5 import objects
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.containers.hdf5.tree import FILE_ALTERED, Hdf5File, Hdf5Source
from teachonce.store.tools.verify import verify
from tests.integrity.forged_hdf5 import _anatomy, forge_block
from tests.making.stores import copied

Copy = Callable[..., Path]
IDS = "parts/0/token/id"


@pytest.fixture
def copy(tmp_path: Path, small_store: Callable[[str], Path]) -> Copy:
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
def test_chunks_of_another_storage_size(copy: Copy, stored: int) -> None:
    path = copy("h5")
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
def test_links_are_followed_nowhere(tmp_path: Path, copy: Copy, kind: str, place: str) -> None:
    path, outside = copy("h5"), tmp_path / "outside"
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
def test_attributes_of_another_program_are_left_out(copy: Copy, value: Any) -> None:
    path = copy("h5")
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
