"""The tables of sizes and times of students, with tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import latency
from benchmarks.quality import tagger_sizes
from teachonce.store.format.features import TaskSpec
from tests.benchmarks.test_reproduce import in_this_process
from tests.downstream.test_bilstm import saved
from tests.end_to_end.support import ok
from tests.teacher_dump.windows.test_label_numbers import TAGS


def test_sizes_are_scored_and_timed_beside_the_teacher(
    tmp_path: Path,
    tiny_teacher: Callable[..., Path],
    make_tokenizer: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency, "in_own_process", in_this_process)
    student = saved(make_tokenizer("wordpiece"), tmp_path / "s", TaskSpec("tagging", TAGS))
    rows = latency.measured([student], tiny_teacher("bert"), tagger_sizes.SPEED)
    scores = {"teacher": {"F1": [0.9]}, "24,24": {"F1": [0.5, 0.6]}}
    teacher, told = tagger_sizes.sizes_table(scores, rows).splitlines()[2:]
    assert teacher.startswith("| teacher |  | 0.900 |") and "| 1/1.0 |" in teacher
    assert told.startswith("| 24 | 24 | 0.550 ± 0.071 |")
    share = rows[1]["parameters"] / rows[0]["parameters"]
    assert f"| 1/{share:.1f} |" in told


def test_latency_of_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "TEACHER", ("64x4x4", 300))
    monkeypatch.setattr(latency, "STUDENTS", (("16x1x2", 50), ("64x2x4", 300)))
    results = tmp_path / "RESULTS.md"
    ok(latency.main, "--batch-size", 1, "--length", 32, "--results", results)
    rows = [
        line.strip("| ").split(" | ")
        for line in results.read_text().splitlines()
        if line.startswith(("| 64", "| 16"))
    ]
    assert [cells[:2] for cells in rows] == [["64x4x4", "300"], ["16x1x2", "50"], ["64x2x4", "300"]]
    fewer = [float(cells[3]) for cells in rows]
    assert fewer[0] == 1 < fewer[2] < fewer[1]
    assert all(len(cells) == len(latency.HEAD) for cells in rows)
