"""Reads UTF-8 files: lines, tables (.tsv, .csv) with a header, and .jsonl with an object a line.

Every reader refuses any other file in one clear line. Lines end with a line feed; a carriage
return before it and a byte order mark at the start are dropped. `teacher-dump` takes its texts
from these rows (`files`), `downstream` its examples.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.console import counted
from teachonce.support.errors import UserError, nearest

MAX_LINE = 10_000_000
"""Bytes of one line (of one record in .csv); a longer one is refused before it is in memory."""
Seen = Callable[[bytes], object]
"""A function that is called with all bytes of a file in order, line by line, as it is read."""


class CorpusError(UserError):
    """A corpus that cannot be read."""


def ignore(raw: bytes) -> None:
    """Do nothing with the bytes that are read."""


def read_lines(path: Path, seen: Seen = ignore, longest: int | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends.

    `longest` is the number of bytes that a line may have, MAX_LINE by default; no more are in
    memory at once. Raises CorpusError for what is not such a file, and OSError.
    """
    longest = longest or MAX_LINE
    position = 0
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            raw = file.readline(longest + 1)
            if not raw:
                return
            seen(raw)
            if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise CorpusError(
                    f"{path}: looks like UTF-16, expected UTF-8; {_iconv('UTF-16', path)}"
                )
            if (nul := raw.find(b"\0")) >= 0:
                raise CorpusError(
                    f"{path}, line {number}: a NUL byte at byte {position + nul}: "
                    f"this is a binary file; give UTF-8 text"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                if len(raw) <= longest or error.reason != "unexpected end of data":
                    raise _not_utf8(path, number, position, raw, error) from None
            if len(raw) > longest:
                raise CorpusError(
                    f"{path}, line {number}: longer than {longest:,} bytes; "
                    f"put one document on a line"
                )
            position += len(raw)
            yield line.removesuffix("\n").removesuffix("\r")


def _not_utf8(
    path: Path, number: int, position: int, raw: bytes, error: UnicodeDecodeError
) -> CorpusError:
    # the decoder counts from behind a byte order mark
    start = error.start + len(raw) - len(error.object)
    where = f"{path}, line {number}: not UTF-8 at byte {position + start} (0x{raw[start]:02x})"
    if error.reason == "unexpected end of data" and not raw.endswith(b"\n"):
        return CorpusError(
            f"{where}: the file ends inside a character; it was cut off, fetch it again"
        )
    encoding, label = _guess_encoding(raw)
    return CorpusError(f"{where}: looks like {label}; {_iconv(encoding, path)}")


def _guess_encoding(raw: bytes) -> tuple[str, str]:
    """Name the encoding for iconv and for a person.

    Whole words of bytes above 0x7f are Cyrillic, single bytes among ASCII are Latin.
    """
    high = sum(byte >= 0xC0 for byte in raw)
    latin = sum(chr(byte).isalpha() for byte in raw if byte < 0x80)
    if high <= latin:
        return "LATIN1", "Latin-1"
    # small letters, the most of any text, are above 0xe0 in cp1251 and below it in KOI8-R
    if sum(byte >= 0xE0 for byte in raw) * 2 >= high:
        return "CP1251", "cp1251 (Windows Cyrillic)"
    return "KOI8-R", "KOI8-R (Cyrillic)"


def _iconv(encoding: str, path: Path) -> str:
    return f"convert it: iconv -f {encoding} -t UTF-8 '{path}' > '{path.stem}.utf8{path.suffix}'"


Rows = Iterator[tuple[int, list[str]]]
"""Line number and cells of every row; a blank row has no cells."""
NAMED = (".tsv", ".csv", ".jsonl")
"""Suffixes of the files that `named_rows` reads."""

SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}


@dataclass(frozen=True, slots=True)
class Table:
    """A .tsv or .csv file: the names of its columns and their place, and the rows below."""

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
    csv.field_size_limit(MAX_LINE)
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
