"""The long checks of integrity, made short."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.integrity import damage, trials


def test_the_table(tmp_path: Path) -> None:
    counts = {"flips": 0, "stores": 2, "forgeries": 0, "characters": 640, "texts": 20}
    counts |= {"launderings": 30, "edits": 0, "tokenizers": 0, "networks": 2}
    rows, wrong = trials.checked(counts, seed=3)
    assert wrong == []
    assert [line.split(" | ")[1:4] for line in rows.splitlines()[2:]] == [
        ["2", "2", "0"], ["30", "30", "0"], ["2", "2", "0"], ["640", "640", "0"], ["20", "20", "0"],
    ]  # fmt: skip


def test_a_finding_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "problems", lambda path: ["something"])
    none = dict.fromkeys(option for *_, option in trials.CHECKS)
    rows, wrong = trials.checked(dict.fromkeys(none, 0) | {"stores": 2}, 3)
    assert "| 2 | 0 | 2 |" in rows and len(wrong) == 2
