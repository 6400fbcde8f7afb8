"""One kill of each kind; `python -m benchmarks.integrity kills` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrity import shared_kills


@pytest.mark.apart
def test_the_other_readers_of_a_disk_cache_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_kills, "READERS", 2)
    assert list(shared_kills.killed_readers(tmp_path, 1, seed=3)) == [""]


@pytest.mark.apart
def test_the_same_command_trains_a_killed_student(tmp_path: Path) -> None:
    assert list(shared_kills.killed_members(tmp_path, 1, seed=3)) == [""]


@pytest.mark.apart
def test_other_numbers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_kills, "READERS", 1)
    monkeypatch.setattr(shared_kills, "digest_of", lambda path: "another")
    (first, last) = shared_kills.killed_readers(tmp_path, 1, seed=3)
    assert "a reader printed" in first and "a reader printed" in last
