"""`verify` finds a single flipped bit and names where it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from teachonce.store import StoreError, open_store
from teachonce.store.tools.verify import verify
from tests.integrity.damage import damaged, flip_in, good_stores, problems, random_flips
from tests.integrity.damage import small_store as make_small_store
from tests.integrity.support import memory_folder

EXT = ("zarr", "h5")
FLIPS = 60
Copy = Callable[..., Path]


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize("codec", ("default", "small"))
def test_a_sound_store(copy: Copy, ext: str, codec: str) -> None:
    report = verify(copy(ext, codec))
    assert report.problems == [] and report.parts == 3 and report.arrays > 80


@pytest.mark.parametrize("ext", EXT)
def test_any_flipped_bit_is_found(tmp_path: Path, ext: str) -> None:
    path = make_small_store(tmp_path / f"a.{ext}", parts=1, hidden=("mean",), attention=(), views=1)
    for place, found in random_flips(path, FLIPS, seed=1):
        assert found, place
    assert problems(path) == []


@pytest.mark.slow
@pytest.mark.parametrize("ext", EXT)
def test_lost_swapped_doubled_and_extra_things_are_found(ext: str) -> None:
    with memory_folder() as folder:
        path = make_small_store(folder / f"a.{ext}", hidden=("mean", "groups2.1"), attention=())
        found = dict(damaged(path, folder, ext))
    assert len(found) > 15 and [name for name, lines in found.items() if not lines] == []
    assert len(found["missing part"]) == len(found["duplicated part"]) == 1
    assert "part 1" in found["missing part"][0] and "extra part 9" in found["duplicated part"][0]
    for name in ("swapped arrays", "swapped parts"):
        assert all(line.startswith("part ") for line in found[name] if "SHA-256 at" not in line)


def test_no_false_alarm() -> None:
    with memory_folder() as folder:
        for name, found in good_stores(folder, 6):
            assert found == [], name


@pytest.mark.parametrize("ext", EXT)
def test_part_array_and_chunk_are_named(copy: Copy, ext: str) -> None:
    path = copy(ext)
    flip_in(path, "parts/1/view0/logits/ids", 40)
    found = problems(path)
    assert len(found) == (1 if ext == "zarr" else 2)
    assert "part 1: array view0/logits/ids cannot be read (chunk 0)" in found[0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("parts/2/token/id", "part 2: array token/id does not match its checksum"),
        ("manifest", "manifest does not match its checksum"),
    ],
)
def test_a_value_that_was_altered_with_its_own_checksum(copy: Copy, name: str, line: str) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file[name][3] ^= 1
    assert line in problems(path)[0]


def test_bytes_of_hdf5_that_belong_to_no_array(copy: Copy) -> None:
    path = copy("h5")
    with path.open("ab") as file:
        file.write(b"more")
    for size in (None, -4 - 32):
        path.write_bytes(path.read_bytes()[:size])
        assert problems(path) == ["the bytes of the file do not match the SHA-256 at its end"]


def test_missing_extra_and_truncated_files(copy: Copy) -> None:
    path = copy("zarr")
    (path / "parts/0/text/utf8/c/0").unlink()
    (path / "parts/0/notes.txt").write_text("hello")
    shard = path / "parts/2/token/begin/c/0"
    shard.write_bytes(shard.read_bytes()[:-9])
    shutil.rmtree(path / "parts/1/view1/hidden")
    found = "\n".join(problems(path))
    assert "part 0: array text/utf8 cannot be read" in found
    assert "its file parts/0/text/utf8/c/0 is missing" in found
    assert "extra file parts/0/notes.txt" in found
    assert "part 2: array token/begin cannot be read (chunk 0)" in found
    assert "part 1: array view1/hidden/mean/scale cannot be read" in found


def test_a_missing_file_is_never_read_as_zeros(copy: Copy) -> None:
    path = copy("zarr")
    (path / "parts/0/view0/hidden/mean/values/c/0/0").unlink()
    with pytest.raises(StoreError, match="is missing"):
        open_store(path)[0].views[0].hidden["mean"]


def test_truncated_and_extended_hdf5(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["parts/0"].create_dataset("more", data=[1])
        del file["parts/1/token/special"]
    found = "\n".join(problems(path))
    assert "extra object parts/0/more" in found
    assert "missing array parts/1/token/special" in found
    path.write_bytes(path.read_bytes()[:-1000])
    assert "not a readable HDF5 file" in problems(path)[0]


@pytest.mark.parametrize("key", ("created", "identity", "software"))
def test_altered_root_attributes(copy: Copy, key: str) -> None:
    path = copy("zarr")
    root = json.loads((path / "zarr.json").read_text())
    value = root["attributes"][key]
    root["attributes"][key] = (
        value | {"x": 1} if isinstance(value, dict) else "2020-01-01T00:00:00Z"
    )
    (path / "zarr.json").write_text(json.dumps(root))
    expected = "does not match its checksum" if key == "created" else "attributes were altered"
    assert expected in problems(path)[0]
