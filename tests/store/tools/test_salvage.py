"""What is damaged outside the parts, and is known from elsewhere in the store."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import pytest

from benchmarks.integrity.damage import flip
from store import StoreError, UserError, open_store
from store.containers.hdf5.file import append_digest
from store.tools.repair import repair
from store.tools.verify import verify
from tests.store.making import begin, make_part, put_part
from tests.store.tools.test_repair import EXT, PARTS, contents, flip_in, made_again
from tests.store.write.test_writing import SMALL


@pytest.mark.parametrize("store", EXT, indirect=True)
@pytest.mark.parametrize("also", [False, True], ids=["alone", "and a part"])
def test_a_damaged_manifest_is_made_anew(store: Path, also: bool) -> None:
    """Each part holds its own entry; and the root those of what lies outside the parts."""
    before = contents(store)
    if store.is_dir():
        flip(store / "manifest/c/0", 100, 1)
    else:
        with h5py.File(store) as file:
            place = file["manifest"].id.get_chunk_info(0).byte_offset
        flip(store, place + 100, 1)
    if also:
        flip_in(store, 1, "token/id")
    with pytest.raises(StoreError, match="manifest"):
        open_store(store)
    left, report = repair(store)
    assert left == PARTS - also and "manifest" in report.problems[0]
    assert report.damaged_parts() == ({1} if also else set())
    assert made_again(store) == report.damaged_parts()
    assert contents(store) == before


@pytest.mark.parametrize("store", ["zarr"], indirect=True)
@pytest.mark.parametrize("place", [b"{", b'"sealed"', b'"teachonce"', b"weights_hash", b"sha256"])
def test_damaged_root_attributes_are_those_of_the_manifest(store: Path, place: bytes) -> None:
    before = contents(store)
    flip(store / "zarr.json", before["a.zarr/zarr.json"].index(place) + len(place) // 2, 1)
    assert repair(store)[0] == PARTS
    assert made_again(store) == set()
    after = contents(store)
    old, new = (json.loads(files.pop("a.zarr/zarr.json")) for files in (before, after))
    if place == b"{":  # no JSON: when it was begun is nowhere else
        for node in (old, new):
            del node["attributes"]["created"], node["attributes"]["checksum"]
    assert old == new and after == before


@pytest.mark.parametrize("store", ["zarr"], indirect=True)
@pytest.mark.parametrize(
    "file", ["parts/zarr.json", "calibration/hidden/zarr.json", "teacher/zarr.json"]
)
def test_groups_of_zarr_are_written_anew(store: Path, file: str) -> None:
    before = contents(store)
    flip(store / file, 9, 1)
    assert repair(store)[0] == PARTS
    assert made_again(store) == set()
    assert contents(store) == before


@pytest.mark.parametrize("store", ["h5"], indirect=True)
def test_damaged_groups_of_a_part_of_hdf5(store: Path) -> None:
    before = contents(store)
    with h5py.File(store) as file:
        places = [h5py.h5o.get_info(file[f"parts/{part}/token"].id).addr for part in (0, 2)]
    for place in places:
        flip(store, place + 8, 1)
    left, report = repair(store)
    assert left == 1 and report.damaged_parts() == {0, 2}
    assert made_again(store) == {0, 2}
    assert contents(store) == before


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store_that_cannot_be_read_keeps_its_parts(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    writer = begin(path, SMALL)
    put_part(writer, 0, make_part(SMALL, 0))
    writer.close()
    before = contents(path)
    root = path if ext == "h5" else path / "zarr.json"
    root.write_bytes(root.read_bytes()[:40])
    before[str(root.relative_to(tmp_path))] = root.read_bytes()
    with pytest.raises(UserError):
        repair(path)
    assert contents(path) == before


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_stores_without_entries_at_the_root(store: Path) -> None:
    """As they were written before: read, and repaired where the manifest is sound."""
    if store.is_dir():
        node = json.loads((store / "zarr.json").read_text())
        assert node["attributes"].pop("arrays")
        (store / "zarr.json").write_text(json.dumps(node))
    else:
        with h5py.File(store, "r+") as file:
            del file.attrs["arrays"]
        append_digest(store)
    assert verify(store).problems == [] and len(open_store(store)) == 36
    flip_in(store, 1, "token/id")
    assert repair(store)[0] == PARTS - 1
    assert made_again(store) == {1} and verify(store).problems == []
