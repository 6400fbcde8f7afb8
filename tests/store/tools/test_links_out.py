"""Repair changes no target of a link in an untrusted store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from teachonce.store import StoreWriter
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.errors import UserError
from tests.store.tools.test_repair import contents

Copy = Callable[..., Path]


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
