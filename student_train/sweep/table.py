"""The table of a sweep, or of any trained students: for a terminal, in Markdown, as CSV, for
notebooks."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teachonce.student_train.cli import format_number
from teachonce.student_train.output.ranking import (
    LOSS,
    SCORES,
    SPREADS,
    Row,
    compares_losses,
    flat_row,
    ranked,
)
from teachonce.student_train.output.report import read_report, store_contents
from teachonce.student_train.settings.option_fields import loss_words
from teachonce.support import files
from teachonce.support.console import wide_console
from teachonce.support.errors import UserError
from teachonce.support.html import html_table

if TYPE_CHECKING:
    from rich.table import Table

CSV = "sweep.csv"
COLUMNS = (
    "parameters", "steps", "seconds", "valid_loss", "valid_mlm", "valid_mlm_per_character",
    "valid_bits_per_byte", "valid_next", "valid_kl", "valid_kl-next", "valid_hidden",
    "valid_accuracy", "valid_accuracy_matthews", "valid_agreement", "valid_agreement_matthews",
    "valid_spearman",
)  # fmt: skip


def table(rows: Sequence[Row], varied: Sequence[str]) -> list[list[str]]:
    """Return the headings, then a line for each student: the settings that vary, then its results.

    The validation loss is left out if students have different losses.
    """
    # `steps` may be a setting as well: a row has the number of steps that were trained.
    names = (name for name in COLUMNS if name not in varied and any(name in row for row in rows))
    # Values of different losses cannot be compared.
    incomparable = () if compares_losses(varied) else (LOSS.name,)
    columns = [*(varied or ["folder"]), *(name for name in names if name not in incomparable)]
    scores = dict.fromkeys(name for row in rows for name in flat_row(row) if name not in row)
    columns += [name for name in scores if not name.endswith(SPREADS)]
    lines = [columns]
    for row in map(flat_row, rows):
        cells = (row.get(column, "") for column in columns)
        lines.append([_cell(cell) for cell in cells])
    return lines


def _cell(value: object) -> str:
    # A setting such as `best` is true or false, which is a number to Python.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return format_number(value)


def table_of_references(references: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the headings, then a line for each other model; [] if none has scores."""
    rows = {name: flat_row({SCORES: scores}) for name, scores in references.items() if scores}
    if not rows:
        return []
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = [name for name in names if not name.endswith(SPREADS)]
    lines = [["model", *columns]]
    for model, row in rows.items():
        lines.append([model, *(format_number(row[c]) if c in row else "" for c in columns)])
    return lines


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write every figure of every student, unrounded."""
    rows = [flat_row(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    files.write(path, text.getvalue().encode())


def show(lines: list[list[str]]) -> None:
    """Print a table: aligned at a terminal, in Markdown into a file or pipe."""
    console = wide_console()
    if console.is_terminal:
        console.print(aligned(lines))
    else:
        click.echo(markdown(lines))


def markdown(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def aligned(lines: list[list[str]]) -> Table:
    """Make a table for a terminal from its headings, `lines[0]`, and its rows. Figures are not
    wrapped."""
    from rich.table import Table

    # Narrow, and with broken headings, so that the table of a usual sweep fits into 80 columns.
    grid = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in lines[0]:
        if heading in COLUMNS:
            grid.add_column(heading.replace("_", "\n"), justify="right", no_wrap=True)
        else:
            grid.add_column(heading, overflow="fold")
    for line in lines[1:]:
        grid.add_row(*line)
    return grid


OF_PLACE = ("store", "out")  # settings that say where a student is, not what it is


class StudentTable(list[Row]):
    """Lists trained students, the best first; prints as a table, also in a notebook. A row has the
    settings that differ, the folder, and the figures.

    rows: a mapping for each student. varied: the settings that differ.
    """

    def __init__(self, rows: Sequence[Row], varied: Sequence[str]) -> None:
        super().__init__(ranked(rows))
        self.varied = tuple(varied)

    def _lines(self) -> list[list[str]]:
        return table(self, ["folder", *self.varied])

    def __repr__(self) -> str:
        return markdown(self._lines())

    def _repr_html_(self) -> str:
        """Return the table in HTML, for notebooks."""
        head, *lines = self._lines()
        return html_table("students, the best first", lines, head)


def student_table(*folders: str | PathLike[str]) -> StudentTable:
    """Compare trained students by the settings that differ and by their validation figures.

    folders: the folders of the students, or of sweeps, of which all finished students are listed.

    Raises UserError for a folder without a finished student, and if no folder is given.
    """
    if not folders:
        raise UserError("student_table: no folder given; give folders that student-train wrote")
    if wrong := [one for one in folders if not isinstance(one, str | PathLike)]:
        raise TypeError(
            f"student_table: expected folders, got {type(wrong[0]).__name__}; call"
            " student_table(FOLDER, ...), or student_table(*folders) for a list"
        )
    reports = dict[Path, dict[str, Any]]()
    for folder in map(Path, folders):
        paths = [folder, *sorted(p.parent for p in folder.glob("*/training.json"))]
        finished = {p: report for p in paths if "result" in (report := read_report(p) or {})}
        if not finished:
            raise UserError(f"{folder}: no finished student; give folders that student-train wrote")
        reports |= {p.resolve(): report for p, report in finished.items()}  # "." has a name, too
    alike = Counter(folder.name for folder in reports)
    settings = [report["settings"] for report in reports.values()]
    names = dict.fromkeys(name for s in settings for name in s if name not in OF_PLACE)
    varied = [n for n in names if any(s.get(n) != settings[0].get(n) for s in settings)]
    contents = [store_contents(report) for report in reports.values()]
    # By content: a store that was moved is the same store.
    varied += ["store"] if any(content != contents[0] for content in contents) else []
    rows = [
        {
            **{name: _word(report["settings"].get(name)) for name in varied},
            "folder": "/".join(folder.parts[-2 if alike[folder.name] > 1 else -1 :]),
            **report["result"],
        }
        for folder, report in reports.items()
    ]
    return StudentTable(rows, varied)


def _word(value: object) -> object:
    """Return the value of a setting as on the command line."""
    return loss_words(value) if isinstance(value, dict) else value
