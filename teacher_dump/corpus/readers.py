"""Reads the texts of one local file: .txt, .jsonl, .csv, .tsv (a table or token/tag), .parquet.

Every reader streams the texts in order, empty ones too, with their gold labels, and raises
CorpusError (one line: file, line, expected and got, remedy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from teachonce.support.console import counted
from teachonce.support.errors import first_line
from teachonce.teacher_dump.corpus.labelled_text import (
    DEFAULT_COLUMN,
    Columns,
    Gold,
    LabelledText,
    check_label,
    choose_column,
    gold_of,
    joined_text,
)
from teachonce.teacher_dump.corpus.tables import read_objects, read_table
from teachonce.teacher_dump.corpus.utf8_lines import CorpusError, Seen, ignore, read_lines

PEEK_LINES = 1000
"""Number of lines by which a token/tag file is told from a table."""
SAMPLE_ROWS = 100
"""Number of rows by which a column of text is told from a column of numbers."""
BLOCK = 1 << 20
"""Bytes that are read at once for a hash."""


def read_rows(path: Path, columns: Columns, seen: Seen = ignore) -> Iterator[LabelledText]:
    """Read the texts of a file by its suffix. `seen` is told the bytes that are read."""
    return READERS[path.suffix.lower()](path, columns, seen)


def has_columns(path: Path, columns: Columns) -> bool:
    """Whether the texts of a file stand in a column, not on lines or as words with tags."""
    suffix = path.suffix.lower()
    return suffix != ".txt" and not (suffix == ".tsv" and _is_tagged(path, columns))


def _read_txt(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    return (LabelledText(line, number) for number, line in enumerate(read_lines(path, seen), 1))


def _read_jsonl(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    chosen, label = list[str](), columns.label
    for number, row in read_objects(path, seen):
        if row is None:
            yield LabelledText("", number)
            continue
        where = f"{path}, line {number}"
        if not chosen:
            textual = [n for n, value in row.items() if isinstance(value, str) and n != label]
            chosen = columns.chosen(list(row), textual, where)
        if absent := [name for name in chosen if name not in row]:
            choose_column(list(row), [], absent[0], where)
        check_label(list(row), label, where)
        gold = gold_of(row[label], label, where) if label else None
        text = joined_text([row[name] for name in chosen], chosen, where)
        yield LabelledText(text, number, gold)


def _read_tsv(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    tagged = _is_tagged(path, columns)
    return _read_tagged(path, seen) if tagged else _read_table(path, columns, seen)


def _read_table(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    """Read the texts of a table with a header; a blank row is an empty text."""
    table = read_table(path, seen)
    header, sample = table.header, list(islice(table.rows, SAMPLE_ROWS))
    textual = [
        name
        for i, name in enumerate(header)
        if name != columns.label and not all(_is_number(row[i]) for _, row in sample if row)
    ]
    chosen = columns.chosen(header, textual, table.where)
    places = [header.index(name) for name in chosen]
    check_label(header, columns.label, table.where)
    label = header.index(columns.label) if columns.label else None
    for number, row in chain(sample, table.rows):
        gold = gold_of(row[label], columns.label, path) if row and label is not None else None
        cells, where = [row[place] for place in places] if row else [], f"{path}, line {number}"
        yield LabelledText(joined_text(cells, chosen, where) if row else "", number, gold)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell
    return True


def _is_tagged(path: Path, columns: Columns) -> bool:
    """Whether the lines are `token<TAB>tag` with empty lines between sentences, and no header."""
    first = islice(read_lines(path), PEEK_LINES)
    rows = [line.split("\t") for line in first if not _is_comment(line)]
    if not rows or {columns.text or DEFAULT_COLUMN, columns.second, columns.label} & set(rows[0]):
        return False
    gaps = [i for i, row in enumerate(rows) if row == [""]]
    inner = any(i and rows[i - 1] != [""] and any(r != [""] for r in rows[i:]) for i in gaps)
    return inner and all(len(row) == 2 for row in rows if row != [""])


def _is_comment(line: str) -> bool:
    return line.startswith("#") and "\t" not in line


def tagged_sentences(path: Path, seen: Seen = ignore) -> Iterator[list[tuple[int, str, str]]]:
    """Read the sentences of a token/tag file: line number, word and tag of each word.

    A word or a tag may be empty. Blank lines end a sentence; comments (# without a tab) are left
    out. Raises CorpusError for a line with another number of columns.
    """
    words: list[tuple[int, str, str]] = []
    for number, line in enumerate(read_lines(path, seen), 1):
        if not line.strip():
            if words:
                yield words
            words = []
        elif not _is_comment(line):
            cells = line.split("\t")
            if len(cells) != 2:
                raise CorpusError(
                    f"{path}, line {number}: expected token<TAB>tag, and a blank line between "
                    f"sentences, got {counted(len(cells), 'column')}"
                )
            words.append((number, cells[0], cells[1].strip()))
    if words:
        yield words


def _read_tagged(path: Path, seen: Seen) -> Iterator[LabelledText]:
    """Read each sentence as its tokens joined by blanks, on the line of the first token."""
    for words in tagged_sentences(path, seen):
        tags, begin = [], 0
        for _, word, tag in words:
            if tag:
                tags.append((begin, begin + len(word), tag))
            begin += len(word) + 1
        text, lines = " ".join(word for _, word, _ in words), tuple(n for n, _, tag in words if tag)
        yield LabelledText(text, words[0][0], Gold(tags=tuple(tags)), lines)


def _read_parquet(path: Path, columns: Columns, seen: Seen) -> Iterator[LabelledText]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _seen_whole(path, seen), pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            label = columns.label
            check_label(schema.names, label, path)
            textual = [field.name for field in schema if _is_text(field.type)]
            others = [name for name in textual if name != label]
            chosen = columns.chosen(schema.names, others, path)
            if wrong := [name for name in chosen if name not in textual]:
                got = schema.field(wrong[0]).type
                raise CorpusError(
                    f"{path}: expected text in column {wrong[0]!r}, got {got}; "
                    f"give another --text-column"
                )
            kept = chosen if label is None else [*chosen, label]
            batches = file.iter_batches(batch_size=1000, columns=kept)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                where = f"{path}, row {number}"
                gold = gold_of(row[label], label, where) if label else None
                text = joined_text([row[name] for name in chosen], chosen, where)
                yield LabelledText(text, number, gold)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{path}: not a readable parquet file ({first_line(error)}); write it again"
        ) from None


@contextmanager
def _seen_whole(path: Path, seen: Seen) -> Iterator[None]:
    """Tell the bytes of a file that a library reads here and there, and more where they are others
    after the reading: what was read is then none of both."""
    if seen is ignore:
        yield
        return
    before = hashlib.sha256()
    with path.open("rb") as file:
        while raw := file.read(BLOCK):
            before.update(raw)
            seen(raw)
    try:
        yield
    finally:
        try:
            with path.open("rb") as file:
                after = hashlib.file_digest(file, "sha256").digest()
        except OSError:
            after = b""
        if after != before.digest():
            seen(b"changed")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


READERS: dict[str, Callable[[Path, Columns, Seen], Iterator[LabelledText]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".csv": _read_table,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
