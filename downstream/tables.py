"""Rows of .tsv, .csv and .jsonl files by the names of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.console import counted
from support.errors import UserError
from teacher_dump.corpus.readers import csv_rows, json_rows
from teacher_dump.corpus.utf8_lines import read_lines


class Row(dict[str, Any]):
    """The cells of a row by column; `where` it stands, for errors."""

    def __init__(self, where: str, cells: Mapping[str, Any]) -> None:
        super().__init__(cells)
        self.where = where

    def cell(self, role: str, columns: Mapping[str, str]) -> Any:
        """The cell of what is called `role` here, in a column of that name or that of `columns`.

        Raises UserError where there is no such column.
        """
        name = columns.get(role, role)
        if name not in self:
            listed = ", ".join(map(repr, self)) or "none"
            raise UserError(
                f"{self.where}: no column {name!r}; its columns are {listed}; "
                f"name the right one with --{role.replace('_', '-')}-column"
            )
        return self[name]

    def text(self, role: str, columns: Mapping[str, str]) -> str:
        """The same where it must be text that is more than blanks."""
        value = self.cell(role, columns)
        if not isinstance(value, str) or not value.strip():
            got = "nothing" if value is None or value == "" else f"{value!r:.60}"
            raise UserError(
                f"{self.where}: expected text in column {columns.get(role, role)!r}, got {got}; "
                "mend the row or take it out"
            )
        return value


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its suffix; tables begin with a header. Blank lines are left out.

    .tsv knows no quotes: cells begin and end with them. Raises UserError with file and line on what
    cannot be read, and where there is no row.
    """
    if path.suffix.lower() not in READERS:
        expected = ", ".join(READERS)
        raise UserError(f"{path}: expected a file that ends in {expected}; convert or rename it")
    try:
        rows = list(READERS[path.suffix.lower()](path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    if not rows:
        raise UserError(f"{path}: has no rows; give a header and a row for each example")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    for number, cells in json_rows(path):
        if cells is not None:
            yield Row(f"{path}, line {number}", cells)


def _tsv(path: Path) -> Iterator[Row]:
    return _table(path, ((n, line.split("\t")) for n, line in enumerate(read_lines(path), 1)))


def _csv(path: Path) -> Iterator[Row]:
    return _table(path, csv_rows(path))


def _table(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    header: list[str] = []
    for number, cells in rows:
        where = f"{path}, line {number}"
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = cells
            if len(set(header)) < len(header):
                raise UserError(f"{where}: two columns of the header have one name; rename one")
        elif len(cells) != len(header):
            raise UserError(
                f"{where}: expected {counted(len(header), 'column')} as in the header,"
                f" got {len(cells)}; quote cells that hold the separator (.csv) or take it out"
                " (.tsv)"
            )
        else:
            yield Row(where, dict(zip(header, cells, strict=True)))


READERS = {".tsv": _tsv, ".csv": _csv, ".jsonl": _jsonl}
