"""Reads tables (rows with named cells) from .csv, .tsv, .jsonl, .ndjson, .json and .parquet files,
and from data sets that `datasets` saved.

`teacher-dump` reads its texts from these rows (`files`, `sources`), `downstream` its examples. If a
schema names classes, cells hold the names.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from teachonce.support.console import counted
from teachonce.support.errors import first_line
from teachonce.teacher_dump.corpus import text_files
from teachonce.teacher_dump.corpus.class_names import features_in, with_class_names
from teachonce.teacher_dump.corpus.text_files import (
    CorpusError,
    Seen,
    ignore_bytes,
    inner_return,
    read_lines,
    seen_whole,
    suffix_of,
)

SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
SAMPLE_ROWS = 100  # the first rows, which show whether a column holds texts
SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` of `datasets` writes one of them
DEFAULT_SPLIT = "train"
MESSAGE_KEYS = ({"role"}, {"from", "value"})  # a message of a chat has one of these sets
Row = dict[str, Any]
Rows = Iterator[tuple[int, Row | None]]
"""Number of each row or line, and its cells by column; None for a blank line."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Holds named columns and their rows.

    columns: the names, in order; the names in the first rows if each row names its cells. A nested
        column is named with a dot, as `data.text`.
    textual: the columns that hold texts, lists of words, or chats, in the first rows
    where: place of the header or of the first row, for errors
    rows: reads the rows once; cells of columns that are not requested may be missing
    unit: the unit of row numbers, "line" or "row"
    others: the type in the schema of columns that hold neither texts nor lists
    header: whether a line of the file is a header with the names
    """

    columns: list[str]
    textual: list[str]
    where: str
    rows: Callable[[Sequence[str]], Rows]
    unit: str = "line"
    others: Mapping[str, str] = field(default_factory=dict)
    header: bool = False


def open_table(path: Path, seen: Seen = ignore_bytes) -> TextTable:
    """Open a table and read its header or first row. `seen` receives the bytes that are read.

    Raises CorpusError if the file cannot be parsed, also while rows are read, and OSError.
    """
    if path.is_dir():
        return dataset_table(saved_dataset(path), str(path))
    return TABLES[suffix_of(path)](path, seen)


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote a folder."""
    return any((path / name).is_file() for name in SAVED)


def cell_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the cell of a column, which may be nested. Raises KeyError."""
    if name in row or "." not in name:
        return row[name]
    first, _, rest = name.partition(".")
    inner = row[first]
    if not isinstance(inner, dict):
        raise KeyError(name)
    return cell_of(inner, rest)


def has_cell(row: Mapping[str, Any], name: str) -> bool:
    """Return whether `cell_of` finds this cell."""
    try:
        cell_of(row, name)
    except KeyError:
        return False
    return True


def names_in(row: Mapping[str, Any]) -> list[str]:
    """List the columns of a row, each followed by the columns nested in it, with a dot."""
    names = []
    for name, cell in row.items():
        names.append(name)
        if isinstance(cell, dict):
            names += [f"{name}.{inner}" for inner in names_in(cell)]
    return names


def _of_rows(rows: Rows, name: str, unit: str) -> TextTable:
    """Create a table, called `name` in errors, from rows that name their columns."""
    first = list[tuple[int, Row | None]]()  # blank lines, then the first row
    for numbered in rows:
        first.append(numbered)
        if numbered[1] is not None:
            break
    where = f"{name}, {unit} {first[-1][0] if first else 1}"
    first += islice(rows, SAMPLE_ROWS - 1)
    full = [row for _, row in first if row is not None]
    names = names_in(full[0]) if full else []
    names += dict.fromkeys(name for row in full for name in names_in(row) if name not in names)
    # Of several rows: the first may lack the text, and any may have a number in its place.
    cells = {n: [cell_of(row, n) for row in full if has_cell(row, n)] for n in names}
    textual = [name for name in names if any(map(_has_text, cells[name]))]
    return TextTable(names, textual, where, lambda columns: chain(first, rows), unit)


def _has_text(cell: Any) -> bool:
    # Lists count: the words of a tagger's data set, and chats, are next to a column of ids.
    if isinstance(cell, list):
        return bool(cell) and all(isinstance(item, str) or is_message(item) for item in cell)
    return isinstance(cell, str)


def is_message(item: Any) -> bool:
    """Return whether an item of a list is a message of a chat, also of one with other keys."""
    return isinstance(item, dict) and any(keys <= item.keys() for keys in MESSAGE_KEYS)


def _delimited(path: Path, seen: Seen) -> TextTable:
    """Open a .tsv or .csv file; its header is the first row that is not blank.

    Raises CorpusError if the header is divided by another separator, and for a row whose number of
    cells differs from the header's.
    """
    # In a .tsv quotes are ordinary characters, with which sentences begin and end.
    tsv = suffix_of(path) == ".tsv"
    cells: Iterator[tuple[int, list[str]]]
    if tsv:
        lines = enumerate(read_lines(path, seen), 1)
        cells = ((number, line.split("\t")) for number, line in lines)
    else:
        cells = _csv_rows(path, seen)
    line, header = next(((number, row) for number, row in cells if not _is_blank(row)), (1, []))
    where = f"{path}, line {line}"
    signs = [name for sign, name in SEPARATORS.items() if len(header) == 1 and sign in header[0]]
    if signs:
        raise CorpusError(
            f"{where}: the header {header[0]!r:.60} is one column with {signs[0]} in its name, but"
            f" {'tabs divide a .tsv' if tsv else 'commas divide a .csv'}; write the file with"
            " these, or rename the column"
        )
    rows = _with_names(path, cells, header)
    sample = list(islice(rows, SAMPLE_ROWS))
    full = [row for _, row in sample if row is not None]
    textual = [name for name in header if not all(_is_number(row[name]) for row in full)]
    return TextTable(header, textual, where, lambda columns: chain(sample, rows), header=True)


def _is_blank(row: list[str]) -> bool:
    return not any(map(str.strip, row))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        # A missing number is an empty cell.
        return not cell
    return True


def _with_names(path: Path, rows: Iterator[tuple[int, list[str]]], header: list[str]) -> Rows:
    for number, row in rows:
        if _is_blank(row):
            yield number, None
        elif len(row) == len(header):
            yield number, dict(zip(header, row, strict=True))
        else:
            raise CorpusError(
                f"{path}, line {number}: expected {counted(len(header), 'column')} as in the"
                f" header, got {len(row)}; quote texts that contain the separator (.csv), or remove"
                " it from them (.tsv)"
            )


def _csv_rows(path: Path, seen: Seen) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with its first line; cells may contain line feeds."""
    # The default limit of a cell is 131,072 characters: less than a long document.
    csv.field_size_limit(text_files.MAX_LINE)
    # Without `strict`, a quote that is never closed makes the rest of the file one cell.
    # The line feeds are added again, because those between quotes belong to the cell.
    rows = csv.reader((line + "\n" for line in read_lines(path, seen)), strict=True)
    while True:
        number = rows.line_num + 1
        try:
            yield number, next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "new-line character" in str(error):
                raise inner_return(path, number) from None
            remedy = "close every quote, and double the ones inside a quoted text"
            raise CorpusError(f"{path}, line {number}: {error}; {remedy}") from None


def _objects(path: Path, seen: Seen) -> Rows:
    """Yield the object of each line. Raises CorpusError if a line is not a JSON object."""
    for number, line in enumerate(read_lines(path, seen), 1):
        try:
            row = json.loads(line) if line.strip() else None
        # RecursionError for brackets that are nested too deep.
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{path}, line {number}: not JSON ({error}); expected one object on every line"
            ) from None
        if row is not None:
            _check_object(row, f"{path}, line {number}")
        yield number, row


def _check_object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise CorpusError(
            f'{where}: expected an object like {{"text": "..."}}, got {type(row).__name__}'
        )


def _json(path: Path, seen: Seen) -> TextTable:
    rows = _array(path, seen) if suffix_of(path) == ".json" else _objects(path, seen)
    return _of_rows(rows, str(path), "line")


def _array(path: Path, seen: Seen) -> Rows:
    """Yield the objects of an array, or of a file with one object after another, each with the
    number of its line."""
    # An array may be a single line, so the whole text is in memory, but only one parsed object.
    # `readline` is called with one byte more than `longest`, which must not exceed sys.maxsize.
    text = "\n".join(read_lines(path, seen, longest=sys.maxsize - 1))
    decoder, line, counted_to = json.JSONDecoder(), 1, 0
    position = _skip_blanks(text, 0)
    listed = text.startswith("[", position)
    start = position = _skip_blanks(text, position + listed)
    while position < len(text) and not (listed and text.startswith("]", position)):
        # Counted from the last object on: from the beginning it would take quadratic time.
        line, counted_to = line + text.count("\n", counted_to, position), position
        where = f"{path}, line {line}"
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{where}: not JSON ({error}); expected an array of objects, or one after another"
            ) from None
        _check_object(row, where)
        if not listed and counted_to == start and _skip_blanks(text, position) == len(text):
            _check_no_columns(row, where)
        yield line, row
        position = _skip_blanks(text, position)
        if listed and text.startswith(",", position):
            position = _skip_blanks(text, position + 1)
        elif listed and not text.startswith("]", position):
            break
    if (listed and position == len(text)) or _skip_blanks(text, position + listed) < len(text):
        raise CorpusError(
            f"{path}: the array of objects has no end, or is followed by other text, because the"
            " file was truncated, or several files were concatenated; download it again"
        )


def _check_no_columns(row: Row, where: str) -> None:
    """Raise CorpusError if a file's only object looks like a table stored by columns, or has lists
    of rows, such as the splits of a data set."""
    lists = [cell for cell in row.values() if isinstance(cell, list)]
    length = len(lists[0]) if lists and len(lists) == len(row) else 0
    cells = [value for cell in lists for value in cell]
    nested = any(isinstance(value, list | dict) for value in cells)
    rows = all(isinstance(value, dict) and not is_message(value) for value in cells)
    if cells and rows and len(lists) == len(row):
        raise CorpusError(
            f"{where}: one object with lists of rows ({', '.join(map(repr, row))}), expected an"
            " object for each row; write each list to a file of its own"
        )
    if length > 1 and {len(cell) for cell in lists} == {length} and not nested:
        raise CorpusError(
            f"{where}: one object with lists of {length} cells, expected an object for each row;"
            " write the table as an array of objects"
        )


def _skip_blanks(text: str, position: int) -> int:
    # The four whitespace characters of JSON (RFC 8259). `str.isspace` accepts more.
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _parquet(path: Path, seen: Seen) -> TextTable:
    import pyarrow.parquet as pq

    with _readable(path), pq.ParquetFile(path) as file:
        schema = file.schema_arrow
    kinds = [pair for column in schema for pair in _kinds(column.name, column.type)]
    textual = [name for name, kind in kinds if is_text(_element(kind)) or _is_chat(kind)]
    others = {name: str(kind) for name, kind in kinds if not (is_text(kind) or is_list(kind))}
    features = features_in(schema.metadata, path)

    def rows(columns: Sequence[str]) -> Rows:
        # Parquet is read at random places, so its bytes are hashed before and again after the rows.
        with _readable(path), seen_whole(path, seen), pq.ParquetFile(path) as file:
            # In batches: `read_table` would hold the whole column in memory.
            batches = file.iter_batches(batch_size=1000, columns=list(columns) or None)
            records = (row for batch in batches for row in batch.to_pylist())
            yield from _named_rows(records, features, str(path))

    return TextTable([name for name, _ in kinds], textual, str(path), rows, "row", others)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    # Arrow does not check that strings are UTF-8; `to_pylist` fails at the first that is not.
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{path}: not a readable parquet file ({first_line(error)}); write it again"
        ) from None


def _kinds(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and type of a column and of the columns nested in it."""
    import pyarrow as pa

    yield name, kind
    if pa.types.is_struct(kind):
        for inner in kind:
            yield from _kinds(f"{name}.{inner.name}", inner.type)


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is of texts."""
    import pyarrow as pa

    # A column of categories, as pandas writes it.
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def _is_chat(kind: Any) -> bool:
    import pyarrow as pa

    if not (is_list(kind) and pa.types.is_struct(kind.value_type)):
        return False
    return any(keys <= {field.name for field in kind.value_type} for keys in MESSAGE_KEYS)


def _element(kind: Any) -> Any:
    return kind.value_type if is_list(kind) else kind


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list of any form."""
    import pyarrow as pa

    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _named_rows(rows: Iterable[Row], features: Mapping[str, Any], where: str) -> Rows:
    """Yield the rows with their numbers from 1, and class names in place of class numbers.

    features: the features of the dataset, by column. Raises CorpusError for an unknown class
    number.
    """
    for number, row in enumerate(rows, 1):
        place = f"{where}, row {number}"
        cells = row.items()
        yield number, {k: with_class_names(cell, features.get(k), place) for k, cell in cells}


def dataset_table(rows: Any, where: str) -> TextTable:
    """Create a table from a dataset of `datasets`, loaded or streamed."""
    described = rows.features.to_dict() if rows.features else {}
    numbered = _named_rows(rows, described, where)
    return _of_rows(numbered, where, "row")


def saved_dataset(path: Path, split: str | None = None) -> Any:
    """Load a data set that `save_to_disk` wrote, without reading its rows.

    If the folder has several splits, `split` or the last part of `path` names one. Raises
    CorpusError if the folder cannot be read, lacks the split, or if a split must be named.
    """
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except Exception as error:  # `datasets` raises errors of any type for a damaged folder
        raise CorpusError(
            f"{path}: not a readable data set ({first_line(error)}); save it again"
        ) from None
    if not isinstance(dataset, dict):
        if split not in (None, DEFAULT_SPLIT, dataset.split):
            raise CorpusError(f"{path}: is one data set without splits; leave :{split} out")
        return dataset
    if split is None and len(dataset) == 1:
        (split,) = dataset
    if split not in dataset:
        listed = ", ".join(map(repr, dataset)) or "none"
        raise CorpusError(
            f"{path}: is a data set of several splits, {listed}; name one of them:"
            f" {path / next(iter(dataset), 'train')}"
        )
    return dataset[split]


TABLES: dict[str, Callable[[Path, Seen], TextTable]] = {
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": _delimited,
    ".tsv": _delimited,
    ".parquet": _parquet,
}
"""Functions that open a table, by the suffix of its file."""


def is_table(path: Path) -> bool:
    """Return whether a path is a table, by its suffix, or the folder of a saved data set."""
    return is_saved(path) if path.is_dir() else suffix_of(path) in TABLES


def named_rows(path: Path) -> Iterator[tuple[str, Row, str]]:
    """Yield for each row that is not blank: its place (file and line or row), its cells by column,
    and the place of the columns' names, which is the header or the row itself.

    Raises CorpusError like `open_table`, and if two columns have the same name.
    """
    table = open_table(path)
    if len(set(table.columns)) < len(table.columns):
        twice = next(name for name in table.columns if table.columns.count(name) > 1)
        raise CorpusError(
            f"{table.where}: two columns of the header are named {twice!r}; rename one, or write a"
            " header above the rows if the file has none"
        )
    # Without names, a reader of Parquet yields all columns: the caller chooses among them.
    for number, row in table.rows(()):
        if row is not None:
            place = f"{path}, {table.unit} {number}"
            yield place, row, table.where if table.header else place
