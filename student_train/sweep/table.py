"""Write the table of a sweep: for a terminal, in Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
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
    flat,
)
from teachonce.support import files
from teachonce.support.console import wide_console

if TYPE_CHECKING:
    from rich.table import Table

CSV = "sweep.csv"
COLUMNS = (
    "parameters",
    "steps",
    "seconds",
    "valid_loss",
    "valid_mlm",
    "valid_mlm_per_character",
    "valid_bits_per_byte",
    "valid_next",
    "valid_kl",
    "valid_kl-next",
    "valid_hidden",
    "valid_accuracy",
    "valid_accuracy_matthews",
    "valid_agreement",
    "valid_agreement_matthews",
    "valid_spearman",
)


def scored(rows: Sequence[Row]) -> list[str]:
    """Return the names of all score columns of the rows."""
    return list(dict.fromkeys(name for row in rows for name in flat(row) if name not in row))


def table(rows: Sequence[Row], varied: Sequence[str]) -> list[list[str]]:
    """Return the headings, then a line for each student: the settings that vary, then its results.

    The validation loss is left out if students have different losses.
    """
    found = (name for name in COLUMNS if any(name in row for row in rows))
    # Values of different losses cannot be compared.
    incomparable = () if compares_losses(varied) else (LOSS.name,)
    columns = [*(varied or ["folder"]), *(name for name in found if name not in incomparable)]
    columns += [name for name in scored(rows) if not name.endswith(SPREADS)]
    lines = [columns]
    for row in map(flat, rows):
        cells = (row.get(column, "") for column in columns)
        lines.append([format_number(c) if isinstance(c, (int, float)) else str(c) for c in cells])
    return lines


def table_of_references(references: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the headings, then a line for each other model; [] if none has scores."""
    rows = {name: flat({SCORES: scores}) for name, scores in references.items() if scores}
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
    rows = [flat(row) for row in rows]
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
        return
    for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]):
        click.echo(f"| {' | '.join(line)} |")


def aligned(lines: list[list[str]]) -> Table:
    """Make a table for a terminal: one word of a heading per line, numbers unbroken."""
    # So that the table of a usual sweep fits into 80 columns.
    from rich.table import Table

    made = Table(box=None, pad_edge=False, collapse_padding=True)
    for heading in lines[0]:
        if heading in COLUMNS:
            made.add_column(heading.replace("_", "\n"), justify="right", no_wrap=True)
        else:
            made.add_column(heading, overflow="fold")
    for line in lines[1:]:
        made.add_row(*line)
    return made
