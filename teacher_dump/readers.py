"""Texts of one local file, streamed: .txt, .jsonl, .csv, .tsv (a table or token/tag), .parquet.

Every reader yields the texts in order, empty ones too, and raises CorpusError (one line: file,
line, expected and got, remedy). Lines end with a line feed; a carriage return before it and a byte
order mark at the start are dropped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from store.errors import UserError

MAX_LINE = 10_000_000
"""Bytes of one line (of one record in .csv); a longer one is refused before it is in memory."""
PEEK_LINES = 1000
"""Lines that are looked at to tell a token/tag file from a table."""
SAMPLE_ROWS = 100
"""Rows of a table that are looked at to tell columns of text from columns of numbers."""
DEFAULT_COLUMN = "text"
Seen = Callable[[bytes], object]
"""Told every byte of a file as it is read, by the readers that read it once and in order."""


class CorpusError(UserError):
    """A corpus that cannot be read."""


def ignore(raw: bytes) -> None:
    """What is told of bytes that nobody wants to know."""


def read_texts(path: Path, column: str | None, seen: Seen = ignore) -> Iterator[str]:
    """The texts of a file by its suffix; `column` names the one of a table that holds the text."""
    return READERS[path.suffix.lower()](path, column, seen)


def read_lines(path: Path, seen: Seen = ignore) -> Iterator[str]:
    """Lines of a UTF-8 file without their ends; never more than MAX_LINE bytes at once."""
    position = 0
    with path.open("rb") as file:
        for number in range(1, 1 << 62):
            raw = file.readline(MAX_LINE + 1)
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
                if len(raw) <= MAX_LINE or error.reason != "unexpected end of data":
                    raise _not_utf8(path, number, position, raw, error) from None
            if len(raw) > MAX_LINE:
                raise CorpusError(
                    f"{path}, line {number}: longer than {MAX_LINE:,} bytes; "
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
    """(name for iconv, for a person): whole words above 0x7f are Cyrillic, single bytes not."""
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


def choose_column(columns: list[str], textual: list[str], wanted: str | None, where: object) -> str:
    """The column that holds the text: the one wanted, else `text`, else the only textual one."""
    if wanted is None:
        if DEFAULT_COLUMN in columns:
            return DEFAULT_COLUMN
        if len(textual) == 1:
            return textual[0]
        problem = "no column 'text'"
        remedy = "name the one that holds the text with --text-column"
    elif wanted in columns:
        return wanted
    else:
        problem, remedy = f"no column {wanted!r}", "give one of them as --text-column"
    listed = ", ".join(map(repr, columns)) or "none"
    raise CorpusError(f"{where}: {problem}; its columns are {listed}; {remedy}")


def text_of(value: Any, column: str, where: object) -> str:
    """A value of the text column as text; a missing value (null) is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.40}"
        raise CorpusError(
            f"{where}: expected text in column {column!r}, got {got}; "
            f"is it the right --text-column?"
        )
    return value


def _read_txt(path: Path, column: str | None, seen: Seen) -> Iterator[str]:
    return read_lines(path, seen)


def _read_jsonl(path: Path, column: str | None, seen: Seen) -> Iterator[str]:
    chosen = ""
    for number, line in enumerate(read_lines(path, seen), 1):
        if not line.strip():
            yield ""
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{where}: not JSON ({error}); expected one object on every line"
            ) from None
        if not isinstance(row, dict):
            raise CorpusError(
                f'{where}: expected an object like {{"text": "..."}}, got {type(row).__name__}'
            )
        if not chosen:
            textual = [name for name, value in row.items() if isinstance(value, str)]
            chosen = choose_column(list(row), textual, column, where)
        if chosen not in row:
            choose_column(list(row), [], chosen, where)
        yield text_of(row[chosen], chosen, where)


def _read_csv(path: Path, column: str | None, seen: Seen) -> Iterator[str]:
    return _read_table(path, column, _csv_rows(path, seen))


def _csv_rows(path: Path, seen: Seen) -> Iterator[tuple[int, list[str]]]:
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


def _read_tsv(path: Path, column: str | None, seen: Seen) -> Iterator[str]:
    if _is_tagged(path, column):
        return _read_tagged(path, seen)
    # quotes are ordinary characters here: sentences begin and end with them
    rows = (line.split("\t") if line else [] for line in read_lines(path, seen))
    return _read_table(path, column, enumerate(rows, 1))


def _read_table(
    path: Path, column: str | None, rows: Iterator[tuple[int, list[str]]]
) -> Iterator[str]:
    """The text column of rows (line number, cells), after a header; an empty row is no text."""
    number, header = next(((n, row) for n, row in rows if row), (1, []))
    sample = list(islice(rows, SAMPLE_ROWS))
    textual = [
        name
        for i, name in enumerate(header)
        if not all(_is_number(row[i]) for _, row in sample if i < len(row))
    ]
    chosen = header.index(choose_column(header, textual, column, f"{path}, line {number}"))
    for number, row in chain(sample, rows):
        if row and len(row) != len(header):
            raise CorpusError(
                f"{path}, line {number}: expected {len(header)} columns as in the header, "
                f"got {len(row)}; quote texts that hold the separator (.csv) or take it out (.tsv)"
            )
        yield row[chosen] if row else ""


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell
    return True


def _is_tagged(path: Path, column: str | None) -> bool:
    """Whether the lines are `token<TAB>tag` with empty lines between sentences, and no header."""
    lines = list(islice(read_lines(path), PEEK_LINES))
    rows = [line.split("\t") for line in lines if not _is_comment(line)]
    if not rows or (column or DEFAULT_COLUMN) in rows[0]:
        return False
    gaps = [i for i, row in enumerate(rows) if row == [""]]
    inner = any(i and rows[i - 1] != [""] and any(r != [""] for r in rows[i:]) for i in gaps)
    return inner and all(len(row) == 2 for row in rows if row != [""])


def _is_comment(line: str) -> bool:
    return line.startswith("#") and "\t" not in line


def _read_tagged(path: Path, seen: Seen) -> Iterator[str]:
    """Sentences of a token/tag file: the tokens joined with blanks."""
    tokens: list[str] = []
    for number, line in enumerate(read_lines(path, seen), 1):
        if not line.strip():
            if tokens:
                yield " ".join(tokens)
            tokens = []
        elif not _is_comment(line):
            cells = line.split("\t")
            if len(cells) != 2:
                raise CorpusError(
                    f"{path}, line {number}: expected token<TAB>tag as in the lines before, "
                    f"got {len(cells)} columns"
                )
            tokens.append(cells[0])
    if tokens:
        yield " ".join(tokens)


def _read_parquet(path: Path, column: str | None, seen: Seen) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            textual = [field.name for field in schema if _is_text(field.type)]
            chosen = choose_column(schema.names, textual, column, path)
            if chosen not in textual:
                got = schema.field(chosen).type
                raise CorpusError(
                    f"{path}: expected text in column {chosen!r}, got {got}; "
                    f"give another --text-column"
                )
            for batch in file.iter_batches(batch_size=1000, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    yield value or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise CorpusError(
            f"{path}: not a readable parquet file ({reason}); write it again"
        ) from None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


READERS: dict[str, Callable[[Path, str | None, Seen], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
