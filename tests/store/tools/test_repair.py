"""A damaged part is made again; unknown files and targets of links are left alone.

- A damaged part is dropped and only this part is made again; the store then has its old bytes.
- Repair changes no target of a link in an untrusted store.
- Unknown files and objects in a store are reported and left alone; a quarantine can be undone.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import product
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest

from teachonce.store import StoreError, StoreWriter, open_store
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.merge import merge
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.lease import lease_path
from tests.integrity.damage import flip, flip_in
from tests.making.stores import SMALL, Copy, begin, make_part, put_part, unfinished
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


def test_an_extra_part_is_quarantined_where_it_would_count(store: Path) -> None:
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
def test_a_damaged_manifest_is_made_again(store: Path, also: bool) -> None:
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
def test_damaged_root_attributes_are_restored_from_the_manifest(store: Path, place: bytes) -> None:
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


def test_a_version_that_is_true_is_restored_from_the_manifest(store: Path) -> None:
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


def outside(folder: Path) -> dict[str, bytes]:
    """Make a folder of unrelated files with names like the files of a store."""
    for name in (".tmp-mine", ".tmp-repair-mine", "0.h5", "7.h5", "0/zarr.json", "7/zarr.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return contents(folder / "any")


@pytest.mark.parametrize("place", ["parts", "teacher", "teacher/files", "parts/0/token"])
def test_zarr(tmp_path: Path, copy: Copy, place: str) -> None:
    path, before = copy("zarr"), outside(tmp_path / "outside")
    (path / place).rename(tmp_path / "moved")
    (path / place).symlink_to(tmp_path / "outside")
    with suppress(UserError):  # if nothing remains
        repair(path)
    assert contents(tmp_path / "outside/any") == before


def test_no_temporary_name_can_be_guessed(tmp_path: Path, copy: Copy) -> None:
    path = copy("zarr")
    (tmp_path / "victim").write_text("mine")
    for name in (".tmp-repair-group", ".tmp-unfinished-zarr.json"):
        (path / name).symlink_to(tmp_path / "victim")
    shutil.rmtree(path / "calibration")
    (path / "parts" / "zarr.json").unlink(missing_ok=True)
    repair(path)
    assert (tmp_path / "victim").read_text() == "mine"


def test_parts_elsewhere_are_not_listed(
    tmp_path: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy("zarr")
    (path / "parts").rename(tmp_path / "moved")
    (path / "parts").symlink_to(tmp_path / "moved")
    listed: list[str] = []
    real = os.listdir

    def listing(at: str | Path = ".") -> list[str]:
        listed.append(str(at))
        return real(at)

    monkeypatch.setattr(os, "listdir", listing)
    found = verify(path).problems
    assert any("parts is a symbolic link to a place outside" in line for line in found)
    assert any("part 0: cannot be opened" in line for line in found)
    assert not any(at.endswith("parts") for at in listed)


def test_a_link_to_itself(copy: Copy) -> None:
    path = copy("zarr")
    shutil.rmtree(path / "calibration")
    (path / "calibration").symlink_to("calibration")
    _, report = repair(path)
    assert (
        report.quarantine is not None
        and (report.quarantine / path.name / "calibration").is_symlink()
    )


@pytest.mark.parametrize("state", ["sealed", "writing"])
def test_hdf5(tmp_path: Path, copy: Copy, state: str) -> None:
    path, before = copy("h5"), outside(tmp_path / "outside")
    if state == "writing":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(9) + data[len(data) // 2 + 9 :])
        repair(path)
        assert StoreWriter.peek(path) is not None
        Path(f"{path}.parts").rename(tmp_path / "moved")
    Path(f"{path}.parts").symlink_to(tmp_path / "outside")
    with suppress(UserError):
        repair(path)
    assert contents(tmp_path / "outside/any") == before


LONG = 5000 * "9"  # more digits than Python parses as a number


def add_files(store: Path) -> list[str]:
    for name in (".DS_Store", "parts/.nfs0001", "parts/1/._x", "parts/0/token/id/c/1", "a b/c"):
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_text("strange")
    shutil.copytree(store / "parts/0", store / "parts/01")
    return [
        *("extra file .DS_Store", "extra folder a b", "extra file parts/.nfs0001"),
        *("extra file parts/0/token/id/c/1", "extra folder parts/01", "extra file parts/1/._x"),
    ]


def add_objects(store: Path) -> list[str]:
    with h5py.File(store, "r+") as file:
        file["notes"] = [1]
        file.create_group("parts/1/token/more/inner")
        file["parts/0/a b"] = h5py.ExternalLink("/dev/zero", "x")
        file["soft"] = h5py.SoftLink("/parts/2")
        file.copy("parts/0", "parts/01")
        file.create_group(f"parts/{LONG}")
    names = ("notes", "parts/0/a b", "parts/01", "parts/1/token/more", f"parts/{LONG}", "soft")
    return [f"extra object {name}" for name in names]


ADD: dict[str, Callable[[Path], list[str]]] = {".zarr": add_files, ".h5": add_objects}


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_a_store_with_unknown_items_is_sound(store: Path) -> None:
    with closing(open_store(store)) as sound:
        texts = [record.text for record in sound]
    unknown = ADD[store.suffix](store)
    before = contents(store)
    for command in ("verify", "repair"):
        done = run(command, store)
        said = done.output
        assert done.exit_code == 0 and f"sound, with {len(unknown)} unknown items" in said
        assert [line for line in said.splitlines() if line.startswith("extra")] == unknown
    assert contents(store) == before
    assert [record.text for record in open_store(store)] == texts


@pytest.mark.parametrize("store", EXT, indirect=True)
def test_copies_leave_unknown_items_out(store: Path) -> None:
    sound = store.with_name(f"sound{store.suffix}")
    convert(store, sound)
    ADD[store.suffix](store)
    convert(store, store.with_name("b.zarr"))
    merge([store, sound], store.with_name("c.h5"))
    copies = [store.with_name("b.zarr"), store.with_name("c.h5")]
    if store.is_dir():
        upload(store, "memory://unknown-items/a.zarr")
        fsspec.filesystem("memory").get(
            "/unknown-items/a.zarr", str(store.with_name("d.zarr")), True
        )
        copies.append(store.with_name("d.zarr"))
    for copy in copies:
        report = verify(copy)
        assert report.problems == report.unknown == []


@pytest.mark.parametrize("store", EXT, indirect=True)
@pytest.mark.parametrize(
    "spoil", [flip_ids, lambda store, _: spoil_bias(store)], ids=["id", "bias"]
)
def test_unknown_items_stay_where_something_is_damaged(
    store: Path, spoil: Callable[[Path, int], None]
) -> None:
    """Unknown items remain in Zarr; an HDF5 file is rewritten and the old one quarantined."""
    before = contents(store)
    unknown = ADD[store.suffix](store)
    spoil(store, 2)
    _, report = repair(store)
    assert report.unknown == unknown and report.quarantine
    assert made_again(store) == report.damaged_parts()
    again = verify(store)
    assert again.problems == []
    if store.is_dir():
        assert again.unknown == unknown
    else:
        assert contents(store) == before
        with h5py.File(report.quarantine / store.name) as old:
            assert "notes" in old and "parts/1/token/more/inner" in old


@pytest.mark.parametrize("ext", EXT)
def test_unknown_items_among_the_parts_of_an_unfinished_store(tmp_path: Path, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    unfinished(path, SMALL)
    folder = path / "parts" if ext == "zarr" else Path(f"{path}.parts")
    for name in (".DS_Store", "._0.h5", "x.h5"):
        (folder / name).write_text("strange")
    first = folder / ("0" if ext == "zarr" else "0.h5")
    (shutil.copytree if ext == "zarr" else shutil.copy)(
        first, folder / first.name.replace("0", "01")
    )
    assert len(open_store(path, allow_partial=True).manifest.parts) == 1
    assert repair(path)[1].problems == []
    assert made_again(path) == set(range(1, PARTS))
    assert verify(path).problems == []
    names = {".DS_Store", "._0.h5", "x.h5", first.name.replace("0", "01")}
    assert names <= {file.name for file in folder.iterdir()}
    assert ext == "zarr" or not first.exists()


@pytest.mark.parametrize("store", EXT, indirect=True)
@pytest.mark.parametrize("made", [False, True], ids=["at once", "made again"])
def test_a_repair_is_undone_by_what_it_says(store: Path, made: bool) -> None:
    flip_ids(store, 1)
    spoil_bias(store)
    before = contents(store)
    said = run("repair", store).output
    if made:
        assert made_again(store) == {1} and verify(store).problems == []
    undo = said.strip().rpartition("undo the repair with: ")[2]
    subprocess.run(undo, shell=True, check=True)
    after = contents(store)
    assert {name: after[name] for name in before} == before
    assert StoreWriter.peek(store, "sealed") and len(verify(store).problems) >= 2
    repair(store)  # the folder of the first repair stays unchanged
    assert made_again(store) == {1} and verify(store).problems == []
    assert sorted(file.name for file in store.parent.iterdir())[1:3] == [
        f"{store.name}.aside-1", f"{store.name}.aside-2"
    ]  # fmt: skip


def lose_manifest(store: Path) -> None:
    if store.is_dir():
        shutil.rmtree(store / "manifest")
        (store / "parts/0/token/zarr.json").unlink()
        (store / "teacher/zarr.json").write_text("")
    else:
        with h5py.File(store, "r+") as file:
            del file["manifest"]
        append_digest(store)


def lose_groups(store: Path) -> None:
    if store.is_dir():
        for name in ("parts/1/zarr.json", "parts/zarr.json", "calibration/zarr.json"):
            (store / name).unlink()
    else:
        with h5py.File(store, "r+") as file:
            del file["parts/1"].attrs["part"]
            file["parts/0/token"].attrs["more"] = 3
        append_digest(store)


@pytest.mark.parametrize("store", EXT, indirect=True)
@pytest.mark.parametrize("lose", [lose_manifest, lose_groups])
def test_what_the_rest_determines_is_repaired_at_once(
    store: Path, lose: Callable[[Path], None]
) -> None:
    before = contents(store)
    lose(store)
    done = run("repair", store)
    assert done.exit_code == 0 and "repaired: everything damaged could be derived" in done.output
    assert verify(store).problems == verify(store).unknown == []
    assert contents(store) == before
