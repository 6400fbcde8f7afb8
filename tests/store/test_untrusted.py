"""A store from somebody else may hold anything: it is refused with one line, and reads no file
outside itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from store import StoreError, open_store
from store.manifest import seal_checksum

Copy = Callable[..., Path]


def edit_root(path: Path, **changes: Any) -> None:
    file = path / "zarr.json"
    root = json.loads(file.read_text())
    root["attributes"] |= changes
    file.write_text(json.dumps(root))


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Alter the manifest of a Zarr store and seal it again, as a forger would."""
    value = json.loads(zarr.open_array(path / "manifest", mode="r")[:].tobytes())
    edit(value)
    data = json.dumps(value).encode()
    created = json.loads((path / "zarr.json").read_text())["attributes"]["created"]
    array = zarr.create_array(path / "manifest", shape=len(data), dtype="uint8", overwrite=True)
    array[:] = np.frombuffer(data, np.uint8)
    edit_root(path, checksum=seal_checksum(data, created))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a feature store"),
        ({"version": 2}, "format version 2; this software reads version 1"),
        ({"version": "1"}, "format version '1'"),
        ({"version": True}, "format version True"),
        ({"state": "open"}, "state is 'open'"),
        ({"identity": []}, "identity is not a JSON object"),
        ({"created": 5}, "created is not a time"),
        ({"features": None}, "features must be a JSON object"),
        ({"checksum": "00"}, "does not match its checksum"),
    ],
)
def test_root_attributes(copy: Copy, changes: dict[str, Any], message: str) -> None:
    path = copy("zarr")
    edit_root(path, **changes)
    with pytest.raises(StoreError, match=message):
        open_store(path)


def _part(value: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = value["parts"][0]
    return part


FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m.update(parts={}), "no list of parts"),
    (lambda m: _part(m).update(part="../../etc"), "part of the manifest is not valid"),
    (lambda m: _part(m).update(part=-1), "out of range"),
    (lambda m: _part(m).update(part=1), "not in order"),
    (lambda m: _part(m)["counts"].update(tokens=10**15), "tokens is 1000000000000000"),
    (lambda m: _part(m)["counts"].update(tokens=1.5), "tokens is 1.5"),
    (lambda m: _part(m)["counts"].update(tokens=10**9), "expected .*1000000000"),
    (lambda m: _part(m)["counts"].update(spans=[0]), "spans must have one number for each view"),
    (lambda m: _part(m)["arrays"].update({"../x": {}}), "arrays are not those"),
    (lambda m: _part(m)["arrays"].pop("token/id"), "arrays are not those"),
    (lambda m: _part(m)["arrays"].update({"token/id": 7}), "entry is not valid"),
    (lambda m: _part(m)["arrays"]["token/id"].update(dtype="object"), "is object"),
    (lambda m: m["arrays"].update({"teacher/files/../../x": {}}), "does not belong|cannot be a"),
    (lambda m: m["arrays"].update({"teacher/files/..": {}}), "cannot be a name"),
    (lambda m: m["arrays"].update({"/etc/passwd": {}}), "does not belong in a store"),
    (lambda m: m["attributes"].update(version=3), "root attributes were altered"),
]


@pytest.mark.parametrize(("edit", "message"), FORGERIES)
def test_forged_manifests(copy: Copy, edit: Callable[[Any], Any], message: str) -> None:
    path = copy("zarr")
    edit_manifest(path, edit)
    with pytest.raises(StoreError, match=message):
        open_store(path)


def test_a_manifest_that_lies_about_an_array_is_found_before_reading(copy: Copy) -> None:
    path = copy("zarr")

    def grow(value: dict[str, Any]) -> None:
        part = _part(value)
        part["counts"]["text_bytes"] = 10**12
        part["arrays"]["text/utf8"]["shape"] = [10**12]

    edit_manifest(path, grow)
    fs = open_store(path)
    with pytest.raises(StoreError, match=r"text/utf8 is .*the manifest says|does not ascend"):
        fs[0].text  # noqa: B018


def test_forged_starts_are_refused(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["parts/0/sequence/token_start"][1] = 10**12
        file["parts/1/sequence/text_start"][1] = -5
        file["parts/2/view1/mask/start"][1] = 10**12
    fs = open_store(path)
    for read in (lambda: fs[0], lambda: fs[12].text, lambda: fs[24].views[1].spans):
        with pytest.raises(StoreError, match="ascend"):
            read()


def test_text_that_is_not_utf8(copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        file["parts/0/text/utf8"][0] = 255
    with pytest.raises(StoreError, match="not UTF-8"):
        list(open_store(path).texts())


def test_hdf5_of_other_shapes(tmp_path: Path, copy: Copy) -> None:
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        del file["calibration/hidden/mean/mean"]
        file["calibration/hidden/mean/mean"] = np.zeros(3, "f4")
    with pytest.raises(StoreError, match="not what the manifest says"):
        open_store(path)
    path.unlink()
    path = copy("h5")
    with h5py.File(path, "r+") as file:
        del file["parts/0/token/id"]
        file["parts/0/token/id"] = h5py.SoftLink("/parts/0/token")
    with pytest.raises(StoreError, match="token/id is a link, which is not followed"):
        open_store(path)[0].token_ids  # noqa: B018


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(50))
    (tmp_path / "b.h5").write_text("text")
    (tmp_path / "c.zarr").mkdir()
    (tmp_path / "d.zarr").mkdir()
    (tmp_path / "d.zarr" / "zarr.json").write_text("[1]")
    zarr.create_group(tmp_path / "e.zarr")
    h5py.File(tmp_path / "f.h5", "w").close()
    for name, message in (
        ("none.zarr", "no such file or folder"),
        ("a.h5", "not a readable HDF5 file"),
        ("b.h5", "neither a Zarr folder nor HDF5"),
        ("c.zarr", "a folder without zarr.json"),
        ("d.zarr", "not Zarr format 3"),
        ("e.zarr", "not a feature store"),
        ("f.h5", "not a feature store"),
    ):
        with pytest.raises(StoreError, match=message) as caught:
            open_store(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_blocks_from_outside_are_checked(copy: Copy) -> None:
    fs = open_store(copy("h5"))
    for blocks in ([[0, 13]], [[3, 3]], [[-1, 2]], [[30, 99]], [0, 1]):
        with pytest.raises(StoreError, match="blocks must be"):
            fs.stream(blocks=blocks)
    for wrong in ({"features": ("all",)}, {"view": 2}, {"batch_tokens": 0}, {"skip": -1}):
        with pytest.raises(StoreError):
            fs.stream(**wrong)  # type: ignore[arg-type]
