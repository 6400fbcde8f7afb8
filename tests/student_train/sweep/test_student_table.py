"""The table of trained students: ranked, with the settings that differ, escaped in a notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teachonce import UserError, student_table


def write_student(
    folder: Path, loss: dict[str, float], figure: float | None, content: str = "aa", **more: Any
) -> Path:
    """Write the record of a training. content: the hash of its store."""
    settings = {"loss": loss, "vocab": "5k", "store": f"{folder}.zarr", **more}
    report: dict[str, Any] = {"settings": settings, "environments": []}
    report["store"] = {"content": content}
    if figure is not None:
        report["result"] = {"parameters": 1200, "valid_mlm_per_character": figure, "valid_loss": 9}
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(report | {"tokenizer": "x"}))
    return folder


def test_students_are_ranked_by_a_figure_that_is_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_student(tmp_path / "one", {"mlm": 1.0}, 2.5)
    two = write_student(tmp_path / "<b>two", {"mlm": 1.0, "hidden": 30.0}, 2.25)
    found = student_table(one, str(two))
    assert [row["folder"] for row in found] == ["<b>two", "one"] and found[-1]["loss"] == "mlm=1"
    assert found.varied == ("loss",)
    monkeypatch.chdir(two)
    assert [row["folder"] for row in student_table(".", one)] == ["<b>two", "one"]
    # Losses that differ cannot be compared: valid_loss is left out.
    assert str(found) == (
        "| folder | loss | parameters | valid_mlm_per_character |\n"
        "| --- | --- | --- | --- |\n"
        "| <b>two | mlm=1,hidden=30 | 1,200 | 2.25 |\n"
        "| one | mlm=1 | 1,200 | 2.5 |"
    )
    shown = found._repr_html_()
    assert "<th>valid_mlm_per_character</th>" in shown and "<td>mlm=1,hidden=30</td>" in shown
    assert "<td>&lt;b&gt;two</td>" in shown and "<b>" not in shown


def test_the_finished_students_of_a_sweep_are_listed(tmp_path: Path) -> None:
    figures = {"one": 2.5, "two": 2.25, "stopped": None}
    for name, figure in figures.items():
        write_student(tmp_path / name, {"mlm": 1.0}, figure)
    assert [row["folder"] for row in student_table(tmp_path)] == ["two", "one"]
    (tmp_path / "other").mkdir()
    other = write_student(tmp_path / "other/one", {"mlm": 1.0}, 2.75)
    named = [row["folder"] for row in student_table(tmp_path, other)]
    assert named == ["two", f"{tmp_path.name}/one", "other/one"]


def test_a_setting_that_is_true_or_false_is_no_number(tmp_path: Path) -> None:
    folders = [
        write_student(tmp_path / str(best), {"mlm": 1.0}, 2.5, best=best, seed=1000 + best)
        for best in (False, True)
    ]
    lines = str(student_table(*folders)).splitlines()
    assert lines[2:] == [
        "| False | False | 1,000 | 1,200 | 9 | 2.5 |",
        "| True | True | 1,001 | 1,200 | 9 | 2.5 |",
    ]


def test_students_of_different_stores_are_not_ranked(tmp_path: Path) -> None:
    worse = write_student(tmp_path / "worse", {"mlm": 1.0}, 2.5)
    better = write_student(tmp_path / "better", {"mlm": 1.0}, 2.25, content="bb")
    found = student_table(worse, better)
    assert [row["folder"] for row in found] == ["worse", "better"]
    assert found.varied == ("store",) and found[0]["store"] == f"{worse}.zarr"


def test_masks_that_differ_are_no_rank(tmp_path: Path) -> None:
    """A validation with fewer masks is easier."""
    folders = [
        write_student(tmp_path / str(share), {"mlm": 1.0}, 3 - share, mask_prob=share)
        for share in (0.15, 0.5)
    ]
    assert [row["folder"] for row in student_table(*folders)] == ["0.15", "0.5"]


def test_what_is_no_finished_student_is_refused(tmp_path: Path) -> None:
    started = write_student(tmp_path / "started", {"mlm": 1.0}, None)
    for folder in (started, tmp_path / "missing"):
        with pytest.raises(UserError, match=f"^{folder}: no finished student; give folders that"):
            student_table(folder)


def test_each_column_has_its_own_name(tmp_path: Path) -> None:
    folders = [write_student(tmp_path / f"s{n}", {"mlm": 1.0}, 2.5, steps=n) for n in (3, 6)]
    for folder, steps in zip(folders, (3, 5), strict=True):  # the second was stopped early
        report = json.loads((folder / "training.json").read_text())
        report["result"]["steps"] = steps
        (folder / "training.json").write_text(json.dumps(report))
    lines = str(student_table(*folders)).splitlines()
    assert lines[0] == "| folder | steps | parameters | valid_loss | valid_mlm_per_character |"
    assert [line.split(" | ")[1] for line in lines[2:]] == ["3", "5"]
