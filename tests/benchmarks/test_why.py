"""Decoders of each start and loss are trained, scored and listed in a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.quality import decoders
from tests.end_to_end.support import ok


def rows_of(results: Path) -> list[list[str]]:
    """Read the cells of all lines of tables that hold figures."""
    lines = [line for line in results.read_text().splitlines() if line.startswith("| ")]
    return [cells for line in lines if "---" not in (cells := line.strip("| ").split(" | "))]


@pytest.mark.apart
def test_decoders_of_each_start_and_loss(
    tiny_teacher: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "BOOKS", {"choosing": 0, "scored": 1000})
    monkeypatch.setattr(decoders, "LENGTH", 1000)
    monkeypatch.setattr(decoders, "BATCH", 256)
    results = tmp_path / "RESULTS.md"
    given = ("--work", tmp_path / "w", "--model", tiny_teacher("gpt2"), "--corpus", corpus)
    small = ("--stored", 3000, "--vocab", "300", "--student", "llama:16x1x2", "--tokens", 600)
    arms = ("--arms", "vocab, next;vocab, default", "--rates", "1e-3,2e-3")
    ok(decoders.main, *given, *small, *arms, "--seeds", 2, "--results", results)
    head, plain, default = rows_of(results)
    row, of_default = (dict(zip(head, cells, strict=False)) for cells in (plain, default))
    assert row["start"] == of_default["start"] == "vocab" and row["seeds"] == "2"
    assert (row["losses"], of_default["losses"]) == ("next=1", "default")
    assert row["lr"].endswith(" of 2") and 2 < float(row["bits a byte"].split()[0]) < 9
    assert "minus `next`" not in row
    gain = float(of_default["bits a byte"].split()[0]) - float(row["bits a byte"].split()[0])
    for column in ("minus `next`", "minus best `next`"):
        assert float(of_default[column].split()[0]) == pytest.approx(gain, abs=0.002)
