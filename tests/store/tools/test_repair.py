"""A damaged part is dropped and only this part is made again; the store then has its old bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest

from teachonce.store import StoreError, StoreWriter, UserError, open_store
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support import files
from teachonce.support.lease import lease_path
from tests.integrity.damage import flip, flip_in
from tests.making.stores import SMALL, begin, make_part, put_part, unfinished
from tests.store.containers.test_untrusted import edit_root
from tests.store.dying import Killed, dies_at
from tests.store.tools.test_commands import run

EXT = ("zarr", "h5")
PARTS = 3
ASIDE = ".aside-"


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file in and next to a store, except for the quarantine."""
    files = (file for file in path.parent.rglob("*") if file.is_file() and ASIDE not in str(file))
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in files}


def made_again(path: Path) -> set[int]:
    """Do what the repeated command of the store does, unless repair has finished the store; return
    the numbers of the parts made."""
    if StoreWriter.peek(path, "sealed"):
        return set()
    writer = begin(path, SMALL)
    missing = set(range(PARTS)) - writer.published
    for number in missing:
        put_part(writer, number, make_part(SMALL, number))
    writer.seal()
    return missing


Spoil = Callable[[Path], object]


def drop_part(path: Path, part: int) -> None:
    if path.is_dir():
        shutil.rmtree(path / f"parts/{part}")
    else:
        with h5py.File(path, "r+") as file:
            del file[f"parts/{part}"]


def flip_ids(path: Path, part: int) -> None:
    flip_in(path, f"parts/{part}/token/id")


def in_parts(spoil: Callable[[Path, int], None], *parts: int) -> tuple[Spoil, set[int]]:
    def spoil_each(store: Path) -> None:
        for part in parts:
            spoil(store, part)

    return spoil_each, set(parts)


BIAS = "teacher/weights/pooler.bias"


def spoil_bias(store: Path) -> None:
    if store.is_dir():
        flip(store / BIAS / "c/0", 3, 1)
    else:
        with h5py.File(store, "r+") as file:
            file[BIAS][1] = 7


def flips(name: str) -> Spoil:
    return lambda store: flip(store / name, 9, 1)


def add_key(store: Path) -> None:
    root = store / "zarr.json"
    root.write_bytes(root.read_bytes().replace(b"{", b'{"more": 1,', 1))


def add_bytes(store: Path) -> None:
    with store.open("ab") as file:
        file.write(b"more")


def flip_groups(store: Path) -> None:
    with h5py.File(store) as file:
        places = [h5py.h5o.get_info(file[f"parts/{part}/token"].id).addr for part in (0, 2)]
    for place in places:
        flip(store, place + 8, 1)


IN_BOTH: dict[str, tuple[Spoil, set[int]]] = {
    "nothing": (lambda store: None, set()),
    "a flipped bit": in_parts(flip_ids, 1),
    "two parts": in_parts(flip_ids, 0, 2),
    "a part is gone": in_parts(drop_part, 2),
    "all parts are gone": in_parts(drop_part, 0, 1, 2),
    "outside the parts": (spoil_bias, set()),
}
GROUPS = ("parts/zarr.json", "calibration/hidden/zarr.json", "teacher/zarr.json")
IN_ZARR: dict[str, tuple[Spoil, set[int]]] = {
    "another key of the root": (add_key, set()),
    **{name: (flips(name), set()) for name in GROUPS},
}
IN_HDF5: dict[str, tuple[Spoil, set[int]]] = {
    "bytes between the objects": (add_bytes, set()),
    "groups of two parts": (flip_groups, {0, 2}),
}


@pytest.mark.parametrize(
    ("store", "damage"),
    [*product(EXT, IN_BOTH), *product(["zarr"], IN_ZARR), *product(["h5"], IN_HDF5)],
    indirect=["store"],
)
def test_only_what_is_damaged_is_made_again(store: Path, damage: str) -> None:
    before, (spoil, lost) = contents(store), (IN_BOTH | IN_ZARR | IN_HDF5)[damage]
    spoil(store)
    left, report = repair(store)
    assert left == PARTS - len(lost) and report.damaged_parts() == lost
    assert damage != "nothing" or report.problems == []
    assert (report.lost_outside() == {BIAS}) == (damage == "outside the parts")
    assert not lost or StoreWriter.peek(store) is not None
    assert made_again(store) == lost
    assert contents(store) == before


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_what_is_made_again_must_be_what_it_was(store: Path) -> None:
    spoil_bias(store)
    repair(store)
    before = contents(store)
    for weights in ({"pooler.bias": np.zeros(4)}, {}):
        with pytest.raises(StoreError, match=f"{BIAS} is missing, .*restore the store from a copy"):
            begin(store, SMALL, weights=weights)
        assert contents(store) == before
    assert made_again(store) == set() and verify(store).problems == []


def test_a_part_too_many_is_moved_aside_where_it_would_count(store: Path) -> None:
    before = contents(store)
    shutil.copytree(store / "parts/0", store / "parts/7")
    copied = contents(store)
    left, report = repair(store)
    assert left == PARTS and report.problems == []
    assert report.unknown == ["extra part 7, which is not in the manifest"]
    assert contents(store) == copied  # a sound store and its unknown items are left alone
    flip_ids(store, 1)
    left, report = repair(store)
    assert left == PARTS - 1 and report.damaged_parts() == {1}
    assert made_again(store) == {1}
    assert contents(store) == before  # an unfinished store would treat it as its own


@pytest.mark.parametrize("ext", EXT)
def test_a_damaged_part_of_an_unfinished_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    unfinished(path, SMALL, PARTS)
    if ext == "zarr":
        flip_ids(path, 1)
    else:
        with h5py.File(tmp_path / "a.h5.parts/1.h5", "r+") as file:
            file["parts/1/token/id"][2] = 3
    assert repair(path)[0] == PARTS - 1
    assert made_again(path) == {1} and verify(path).problems == []


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_killed_at_every_rename(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any rename, the store is never sealed with damage, and a repair continues."""
    before = contents(store)
    flip_ids(store, 1)
    for step in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(files, "rename", dies_at(step // 2 + 1, done=bool(step % 2)))
            try:
                repair(store)
                break
            except Killed:
                pass
        damaged = StoreWriter.peek(store) is None and verify(store).problems
        assert damaged or made_again(store) == {1}
        if not damaged:
            assert contents(store) == before
            flip_ids(store, 1)
    else:
        raise AssertionError("never done")
    assert made_again(store) == {1}
    assert contents(store) == before


def test_a_part_that_is_a_link_is_dropped(store: Path) -> None:
    before, precious = contents(store), store.parent / "precious"
    shutil.rmtree(store / "parts/1")
    precious.mkdir()
    (precious / "x").write_text("x")
    (store / "parts/1").symlink_to(precious)
    assert repair(store)[0] == PARTS - 1
    assert (precious / "x").read_text() == "x"
    shutil.rmtree(precious)
    assert made_again(store) == {1}
    assert contents(store) == before


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_a_link_to_a_store(store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The store to which a link leads is repaired, read and completed; the link remains."""
    before, link = contents(store), tmp_path_factory.mktemp("links") / f"link{store.suffix}"
    link.symlink_to(store)
    flip_ids(store, 1)
    assert repair(link)[0] == PARTS - 1
    with open_store(link, allow_partial=True) as partial:
        assert partial.meta["parts"] == PARTS - 1
    assert made_again(link) == {1} and contents(store) == before
    assert link.is_symlink() and list(link.parent.iterdir()) == [link]
    if store.is_file():  # in a cache of the hub, files are links to names without a suffix
        link.unlink()
        link.symlink_to(store.rename(store.with_suffix("")))
        assert repair(link)[0] == PARTS


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_a_repair_that_lost_its_lease_stops(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair that lost its lease stops before its last rename, since another may write there."""
    flip_ids(store, 1)
    root = (store / "zarr.json" if store.is_dir() else store).read_bytes()
    real, lease = files.rename, lease_path(store)

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        lease.write_text(json.dumps({**json.loads(lease.read_text()), "token": "another"}))

    with monkeypatch.context() as patch, pytest.raises(UserError, match="has taken over"):
        patch.setattr(files, "rename", rename)
        repair(store)
    assert (store / "zarr.json" if store.is_dir() else store).read_bytes() == root
    lease.unlink()
    repair(store)
    assert made_again(store) == {1}


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_the_commands_name_each_other(store: Path) -> None:
    def said_by(*words: object) -> str:
        return run(*words).output

    assert "sound" in said_by("repair", store) and len(open_store(store)) == 36
    flip_in(store, "parts/0/token/begin")
    assert f"`feature-store repair {store}`" in said_by("verify", store)
    with pytest.raises(UserError, match="exists already .* `feature-store repair /"):
        begin(store, SMALL)
    said = said_by("repair", store)
    assert "part 0: array token/begin" in said and "2 sound parts left" in said
    said = said_by("verify", store)
    assert (
        "is not finished (2 parts published, 1 missing)" in said and "repeat that command" in said
    )
    said = said_by("repair", store.parent / "none.zarr")
    assert "none.zarr: no such file or folder; " in said and "check the name, or run" in said
    assert "local path" in said_by("repair", "memory://a.zarr")


@pytest.mark.parametrize("store", EXT, indirect=True)
@pytest.mark.parametrize("also", [False, True], ids=["alone", "and a part"])
def test_a_damaged_manifest_is_made_anew(store: Path, also: bool) -> None:
    """A damaged manifest is rebuilt from the entries that each part and the root store."""
    before = contents(store)
    flip_in(store, "manifest", 100)
    if also:
        flip_ids(store, 1)
    with pytest.raises(StoreError, match="manifest"):
        open_store(store)
    left, report = repair(store)
    assert left == PARTS - also and "manifest" in report.problems[0]
    assert report.damaged_parts() == ({1} if also else set())
    assert made_again(store) == report.damaged_parts()
    assert contents(store) == before


@pytest.mark.parametrize("place", [b"{", b'"sealed"', b'"teachonce"', b"weights_hash", b"sha256"])
def test_damaged_root_attributes_are_those_of_the_manifest(store: Path, place: bytes) -> None:
    before = contents(store)
    flip(store / "zarr.json", before["a.zarr/zarr.json"].index(place) + len(place) // 2, 1)
    assert repair(store)[0] == PARTS
    assert made_again(store) == set()
    after = contents(store)
    old, new = (json.loads(files.pop("a.zarr/zarr.json")) for files in (before, after))
    if place == b"{":  # not JSON: the `created` timestamp is nowhere else
        for node in (old, new):
            del node["attributes"]["created"], node["attributes"]["checksum"]
    assert old == new and after == before


def test_a_version_that_is_true_is_that_of_the_manifest(store: Path) -> None:
    """A root version of `true`, which equals 1 in Python, is replaced by the manifest's version."""
    before = json.loads((store / "zarr.json").read_text())
    edit_root(store, version=True)
    assert repair(store)[0] == PARTS
    assert json.loads((store / "zarr.json").read_text()) == before


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store_that_cannot_be_read_keeps_its_parts(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    unfinished(path, SMALL)
    before = contents(path)
    root = path if ext == "h5" else path / "zarr.json"
    root.write_bytes(root.read_bytes()[:40])
    before[str(root.relative_to(tmp_path))] = root.read_bytes()
    with pytest.raises(UserError):
        repair(path)
    assert contents(path) == before


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_stores_without_entries_at_the_root(store: Path) -> None:
    """Older stores, without entries at the root, are read, and repaired with a sound manifest."""
    if store.is_dir():
        node = json.loads((store / "zarr.json").read_text())
        assert node["attributes"].pop("arrays")
        (store / "zarr.json").write_text(json.dumps(node))
    else:
        with h5py.File(store, "r+") as file:
            del file.attrs["arrays"]
        append_digest(store)
    assert verify(store).problems == [] and len(open_store(store)) == 36
    flip_ids(store, 1)
    assert repair(store)[0] == PARTS - 1
    assert made_again(store) == {1} and verify(store).problems == []
