"""The files and functions that a small dump and a training of one step pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import walks


@pytest.mark.apart
def test_a_dump_and_a_training_are_walked(
    tiny_teacher: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    teacher = str(tiny_teacher("bert"))
    functions, calls = walks.walks(walks.HERE, tmp_path, teacher, str(corpus), 600)
    files = {walk: {file for file, _ in passed} for walk, passed in functions.items()}
    assert set(files) == set(walks.WALKS) and all(files.values())
    assert all((walks.HERE / file).is_file() for each in files.values() for file in each)
    assert not any(file.startswith(("tests", "benchmarks")) for file in files["start"])
    assert any(file.startswith("teacher_dump/corpus/") for file in files["dump"])
    assert any(file.startswith("student_train/losses/") for file in files["batch"])
    assert not any(file.endswith("/cli.py") for file in files["batch"])
    assert len(files["batch"]) < len(files["start"]) and calls["open_store"] >= 1


def test_versions_are_compared_in_columns() -> None:
    old = {"dump": [("a.py", "f"), ("a.py", "g")], "start": [("b.py", "f")], "batch": []}
    new = {"dump": [("a.py", "f")], "start": [("b.py", "f")], "batch": []}
    rows = walks.rows([(old, {"open_store": 4}), (new, {})])
    assert [row[1:] for row in rows[:3]] == [["files", 1, 1], ["functions", 2, 1], ["files", 1, 1]]
    assert rows[-1] == ["student-train, `open_store`", "calls", 4, 0]
    assert walks.listing(old).splitlines()[2] == "    2  a.py"
