"""Reads tables: .tsv and .csv files with a header, .jsonl files with an object on every line.

`teacher-dump` takes its texts from these rows (`readers`), `downstream` its examples.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.console import counted
from teachonce.support.errors import nearest
from teachonce.teacher_dump.corpus import utf8_lines
from teachonce.teacher_dump.corpus.utf8_lines import CorpusError, Seen, ignore, read_lines

Rows = Iterator[tuple[int, list[str]]]
"""Line number and cells of every row; a blank row has no cells."""
NAMED = (".tsv", ".csv", ".jsonl")
"""Suffixes of the files that `named_rows` reads."""

SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}


@dataclass(frozen=True, slots=True)
class Table:
    """A .tsv or .csv file: the names of its columns and where they stand, and the rows below."""

    header: list[str]
    where: str
    rows: Rows


def read_table(path: Path, seen: Seen = ignore) -> Table:
    """Open a .tsv or .csv file and read its header, the first row that is not blank.

    Cells of a .tsv are divided by tabs alone: quotes are ordinary characters, with which sentences
    begin and end. Raises CorpusError for a header that another separator divides; also while `rows`
    are read, for a row with another number of cells than the header, and as `read_lines` does.
    """
    tsv = path.suffix.lower() == ".tsv"
    rows = _tsv_rows(path, seen) if tsv else _csv_rows(path, seen)
    line, header = next(((number, row) for number, row in rows if not _is_blank(row)), (1, []))
    where = f"{path}, line {line}"
    found = [name for sign, name in SEPARATORS.items() if len(header) == 1 and sign in header[0]]
    if found:
        raise CorpusError(
            f"{where}: the header {header[0]!r:.60} is one column with {found[0]} in its name, but"
            f" {'.tsv is divided by tabs' if tsv else '.csv is divided by commas'}; write the file"
            " so, or name the column otherwise"
        )
    return Table(header, where, _as_wide(path, rows, len(header)))


def _is_blank(row: list[str]) -> bool:
    return not any(map(str.strip, row))


def _as_wide(path: Path, rows: Rows, width: int) -> Rows:
    for number, row in rows:
        if _is_blank(row):
            yield number, []
        elif len(row) == width:
            yield number, row
        else:
            raise CorpusError(
                f"{path}, line {number}: expected {counted(width, 'column')} as in the header, got"
                f" {len(row)}; quote texts that hold the separator (.csv) or take it out (.tsv)"
            )


def _tsv_rows(path: Path, seen: Seen) -> Rows:
    return ((number, line.split("\t")) for number, line in enumerate(read_lines(path, seen), 1))


def _csv_rows(path: Path, seen: Seen) -> Rows:
    """Yield each record with the line where it begins; its cells may hold line feeds."""
    csv.field_size_limit(utf8_lines.MAX_LINE)
    rows = csv.reader((line + "\n" for line in read_lines(path, seen)), strict=True)
    while True:
        number = rows.line_num + 1
        try:
            yield number, next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise CorpusError(
                f"{path}, line {number}: {error}; "
                f"close every quote, and double the ones inside a quoted text"
            ) from None


def read_objects(path: Path, seen: Seen = ignore) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield line number and object of every line of a .jsonl file; None for a blank line.

    Raises CorpusError for a line that is no JSON object, and as `read_lines` does.
    """
    for number, line in enumerate(read_lines(path, seen), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{path}, line {number}: not JSON ({error}); expected one object on every line"
            ) from None
        if not isinstance(row, dict | None):
            raise CorpusError(
                f'{path}, line {number}: expected an object like {{"text": "..."}}, got'
                f" {type(row).__name__}"
            )
        yield number, row


def named_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and cells by column of every row that is not blank, of a file in NAMED.

    Raises CorpusError where two columns of a header have one name, and as `read_table` and
    `read_objects` do.
    """
    if path.suffix.lower() == ".jsonl":
        yield from ((number, row) for number, row in read_objects(path) if row is not None)
        return
    table = read_table(path)
    if len(set(table.header)) < len(table.header):
        twice = next(name for name in table.header if table.header.count(name) > 1)
        raise CorpusError(
            f"{table.where}: two columns of the header have one name, {twice!r}; rename one, or"
            " begin the file with a header if it has none"
        )
    for number, row in table.rows:
        if row:
            yield number, dict(zip(table.header, row, strict=True))


def no_column(
    name: str, columns: Iterable[str], where: object, remedy: str, role: str = ""
) -> CorpusError:
    """Make the error of a row or table that lacks a column, perhaps one of a `role`."""
    known = list(columns)
    listed = ", ".join(map(repr, known)) or "none"
    return CorpusError(
        f"{where}: no column {name!r}{role}; {nearest(name, known)}its columns are {listed};"
        f" {remedy}"
    )
