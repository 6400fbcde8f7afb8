"""The long checks of integrity, made short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrity import capture_trials, damage, trials


def test_the_table(tmp_path: Path) -> None:
    counts = {"flips": 0, "stores": 2, "forgeries": 0, "characters": 640, "texts": 20}
    counts |= {"launderings": 30, "edits": 0, "tokenizers": 0, "networks": 2}
    rows, wrong = trials.checked(3, **counts)
    assert wrong == []
    assert [row[1:4] for row in rows] == [
        [2, 2, 0], [30, 30, 0], [2, 2, 0], [640, 640, 0], [20, 20, 0],
    ]  # fmt: skip


def test_a_finding_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "problems", lambda path: ["something"])
    (row,), wrong = trials.checked(3, stores=2)
    assert row[1:4] == [2, 0, 2] and len(wrong) == 2


def test_forged_captures() -> None:
    rows, wrong = capture_trials.trial(captures=4, seed=3)
    assert wrong == []
    assert len(rows) == 5 and all(row[1] + row[2] == 4 for row in rows)  # type: ignore[operator]
