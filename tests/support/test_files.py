"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import files


def test_two_files_of_a_folder_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.rename

    def rename(source: Path, target: Path) -> None:
        if target.name == "a":  # the other writer comes when this one is about to give the name
            files.write(tmp_path / "b", b"other")
        real(source, target)

    monkeypatch.setattr(files, "rename", rename)
    files.write(tmp_path / "a", b"one")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a": b"one",
        "b": b"other",
    }
