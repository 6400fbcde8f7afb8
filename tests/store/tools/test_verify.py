"""`verify` finds a single flipped bit and names where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from teachonce.store.tools.verify import verify
from tests.integrity.damage import damaged, good_stores, problems, random_flips
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


NAMED: dict[str, dict[str, tuple[str, ...]]] = {
    "zarr": {
        "missing file": ("part 1: array text/utf8 cannot be read", "text/utf8/c/0 is missing"),
        "extra file": ("extra file parts/0/notes.txt",),
        "truncated data": ("part 0: array view0/logits/ids cannot be read (chunk 0)",),
        "missing array": ("part 0: array view1/logits/rest cannot be read",),
    },
    "h5": {
        "missing array": ("missing array parts/0/view1/logits/rest",),
        "extra array": ("extra object parts/0/notes",),
        "altered value": ("part 0: array token/id does not match its checksum",),
        "truncated file": ("not a readable HDF5 file",),
    },
}


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
    for name, lines in NAMED[ext].items():
        assert all(any(line in each for each in found[name]) for line in lines), found[name]


def test_no_false_alarm() -> None:
    with memory_folder() as folder:
        for name, found in good_stores(folder, 6):
            assert found == [], name


def test_bytes_of_hdf5_that_belong_to_no_array(copy: Copy) -> None:
    path = copy("h5")
    with path.open("ab") as file:
        file.write(b"more")
    for size in (None, -4 - 32):
        path.write_bytes(path.read_bytes()[:size])
        assert problems(path) == ["the bytes of the file do not match the SHA-256 at its end"]
