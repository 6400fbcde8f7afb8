"""Unknown files and objects in a store are reported and left alone; a quarantine can be undone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import fsspec
import h5py
import pytest

from teachonce.store import StoreWriter, open_store
from teachonce.store.containers.hdf5.file import append_digest
from teachonce.store.tools.copy import convert, upload
from teachonce.store.tools.merge import merge
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from tests.making.stores import SMALL, unfinished
from tests.store.tools.test_commands import run
from tests.store.tools.test_repair import EXT, PARTS, contents, flip_ids, made_again, spoil_bias

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
def test_what_the_rest_tells_is_mended_at_once(store: Path, lose: Callable[[Path], None]) -> None:
    before = contents(store)
    lose(store)
    done = run("repair", store)
    assert done.exit_code == 0 and "repaired: everything damaged could be derived" in done.output
    assert verify(store).problems == verify(store).unknown == []
    assert contents(store) == before
