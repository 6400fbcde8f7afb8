"""The table of trained students, for Python and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import SupportsIndex, overload

from teachonce.student_train.output.ranking import Row, ranked
from teachonce.student_train.output.report import read_report, store_contents
from teachonce.student_train.sweep.table import table
from teachonce.support.errors import UserError
from teachonce.support.html_table import html_table

OF_PLACE = ("store", "out")  # settings that say where a student is, not what it is


class StudentTable(Sequence[Row]):
    """Trained students, the best first, printed as a table, also in a notebook. A row has the
    settings that differ, the folder, and the figures.

    rows: a mapping for each student. varied: the settings that differ.
    """

    def __init__(self, rows: Sequence[Row], varied: Sequence[str]) -> None:
        self.rows, self.varied = ranked(rows), tuple(varied)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Row | list[Row]:
        """Return the student at an index, or a list of students for a slice."""
        return self.rows[index]

    def _lines(self) -> list[list[str]]:
        return table(self.rows, ["folder", *self.varied])

    def __repr__(self) -> str:
        """Return the table in Markdown."""
        head, *lines = self._lines()
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *lines))

    def _repr_html_(self) -> str:
        """Return the table in HTML, for notebooks."""
        head, *lines = self._lines()
        return html_table("students, the best first", lines, head)


def student_table(*folders: str | PathLike[str]) -> StudentTable:
    """Compare trained students by the settings that differ and by their validation figures.

    folders: the folders of the students.

    Raises UserError for a folder without a finished student.
    """
    reports = {}
    for folder in map(Path, folders):
        report = read_report(folder)
        if report is None or "result" not in report:
            raise UserError(f"{folder}: no finished student; give folders that student-train wrote")
        reports[folder] = report
    settings = [report["settings"] for report in reports.values()]
    names = dict.fromkeys(name for each in settings for name in each if name not in OF_PLACE)
    varied = [n for n in names if any(each.get(n) != settings[0].get(n) for each in settings)]
    contents = [store_contents(report) for report in reports.values()]
    # By content: a store that was moved is the same store.
    varied += ["store"] if any(each != contents[0] for each in contents) else []
    rows = [
        {
            **{name: _word(report["settings"].get(name)) for name in varied},
            "folder": folder.name,
            **report["result"],
        }
        for folder, report in reports.items()
    ]
    return StudentTable(rows, varied)


def _word(value: object) -> object:
    """Return the value of a setting as on the command line."""
    if isinstance(value, dict):
        return ",".join(f"{name}={each:g}" for name, each in value.items())
    return value
