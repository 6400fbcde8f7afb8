"""Read tables row by row: Parquet files and folders of `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import numbered, regular
from teachonce.feature_store.captures.schema import Numbers, checked
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line
from teachonce.support.parsing import read_json
from teachonce.teacher_dump.corpus.tables import is_list

END = b"\xff\xff\xff\xff\0\0\0\0"  # the end marker of an Arrow stream
STATE, SPLITS = "state.json", "dataset_dict.json"
BATCH = 64  # rows in memory at a time; a long sequence takes a few MB
Cells = Mapping[str, Any]
"""The cells of a row as Arrow scalars, by column."""


@dataclass(frozen=True)
class TableFiles:
    """Holds the files of one table, Arrow or Parquet, and its columns."""

    path: Path
    files: list[Path]
    columns: tuple[str, ...]
    schemas: list[Any]
    """The schema of each file; columns and types are equal, metadata may differ."""

    @property
    def schema(self) -> Any:
        """Return the schema of the first file."""
        return self.schemas[0]

    def rows(self, columns: list[str]) -> Iterator[tuple[str, Cells]]:
        """Yield for each row its file and number, as text for messages, and its cells as Arrow
        scalars.

        Raises UserError for a file that Arrow cannot read.
        """
        for path in self.files:
            number = 0
            with _arrow_errors(path):
                for batch in _batches(path, columns):
                    cells = {name: batch.column(name) for name in columns}
                    for row in range(batch.num_rows):
                        yield (
                            f"{path}, row {number}",
                            {name: column[row] for name, column in cells.items()},
                        )
                        number += 1


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    """Raise UserError if Arrow fails inside the `with` block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library raises errors of any kind for a bad file
        raise UserError(f"{path}: cannot be read ({first_line(error)}); copy it again") from None


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=BATCH, columns=columns):
                rows -= batch.num_rows
                yield batch
            if rows:  # pyarrow accepts row groups with fewer rows than the metadata declare
                raise UserError(f"{path}: has {rows:,} rows fewer than it declares; copy it again")
        return
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate(full=True)  # a forged file may have offsets outside its buffers
            yield batch


def open_table_files(path: Path) -> TableFiles | None:
    """Open a Parquet file, a folder of Parquet files, or a folder of `datasets`.

    Returns None for other paths. Raises UserError for a table that cannot be read, and for a folder
    with several splits.
    """
    if path.is_dir() and (path / SPLITS).is_file():
        splits = [split for split in sorted(path.iterdir()) if (split / STATE).is_file()]
        if len(splits) != 1:
            names = " or ".join(str(split) for split in splits) or "none is complete"
            raise UserError(f"{path}: is a folder of several splits; give one of them: {names}")
        path = splits[0]
    files = regular(_files_of(path))
    if not files:
        return None
    schemas = [_schema(file) for file in files]
    columns = tuple(schemas[0].names)
    # Arrow cannot look a column up by a name that occurs twice.
    if len(set(columns)) < len(columns):
        raise UserError(
            f"{files[0]}: two columns have the same name: {', '.join(columns)}; rename one"
        )
    first = _types(schemas[0])
    for other, schema in zip(files, schemas, strict=True):
        if (types := _types(schema)) != first:
            raise UserError(
                f"{other}: its columns are {types}, and the columns of {files[0]} {first}; remove"
                " the files that belong to another table"
            )
    return TableFiles(path, files, columns, schemas)


class TableCapture:
    """Reads a capture in one table. Raises UserError unless `path` holds a table that `fits`;
    `wanted` describes such a table in messages."""

    def __init__(self, path: Path, fits: Callable[[TableFiles], object], expected: str) -> None:
        table = open_table_files(path)
        if table is None or not fits(table):
            columns = ", ".join(table.columns) if table else "none"
            raise UserError(
                f"{path}: no {expected}; its columns are {columns}: check the path and --format"
            )
        self._table: TableFiles = table
        self.settings: dict[str, Any] = {}

    def files(self) -> list[Path]:
        return list(self._table.files)


def holds_table(fits: Callable[[TableFiles], object], path: Path) -> bool:
    """Return whether a path holds a table that `fits`."""
    table = open_table_files(path)
    return table is not None and bool(fits(table))


def _types(schema: Any) -> str:
    """Describe the columns and their types, sorted by name."""
    # Sorted: cells are read by name, so files of one table may order their columns differently.
    return ", ".join(sorted(f"{field.name} ({field.type})" for field in schema))


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    if not (path / STATE).is_file():
        return numbered(path.glob("*.parquet"))
    shape = {"_data_files": [{"filename": str}]}
    files = read_json(path / STATE, shape, "; copy it again")["_data_files"]
    if not files:
        raise UserError(f"{path / STATE}: lists no data file; copy the folder again")
    # Only the last component: a forged name must not lead out of the folder.
    return [path / Path(entry["filename"]).name for entry in files]


def _schema(path: Path) -> Any:
    with _arrow_errors(path):
        schema = _read_schema(path)
        _types(schema)  # raises for names that are not UTF-8
        return schema


def _read_schema(path: Path) -> Any:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(path)
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        schema = pyarrow.ipc.open_stream(file).schema
        # pyarrow reads a stream that was cut between two batches as a shorter one.
        if file.size() >= len(END):
            file.seek(file.size() - len(END))
            if file.read() == END:
                return schema
    raise UserError(f"{path}: is truncated; copy it again")


def first_width(table: TableFiles, field: Numbers) -> int:
    """Return the number of values per token (of a vector: its size) in the first row that has any.

    Raises UserError if no row has a value.
    """
    for where, cells in table.rows([field.name]):
        if width := int(numbers(field, cells, where).shape[-1]):
            return width
    raise UserError(f"{table.path}: holds no row, so there is nothing to import; check the path")


def row_arrays(fields: Sequence[Numbers], cells: Cells, where: str) -> dict[str, Array]:
    """Return the arrays of a row by name. Raises UserError as `checked` does."""
    return checked(fields, {field.name: _stored(field, cells, where) for field in fields}, where)


def numbers(field: Numbers, cells: Cells, where: str) -> Array:
    """Return the numbers of one column of a row. Raises UserError if they do not fit the field."""
    return field.array(_stored(field, cells, where), where)


def _stored(field: Numbers, cells: Cells, where: str) -> Array:
    """Return a cell as stored: a list of numbers [T], or a list of lists of equal length [T,B].

    Raises UserError for any other cell.
    """
    cell, nested = cells[field.name], len(field.dims) == 2
    rows: Any = cell.values if is_list(cell.type) else None
    flat = rows
    if rows is not None and nested:
        # Not `rows.values`, which has the numbers of all rows of the batch.
        flat = rows.flatten() if is_list(rows.type) else None
    if (
        flat is None
        or not (_numeric(flat.type) or (nested and not len(flat)))
        or rows.null_count
        or flat.null_count
    ):
        kind = "lists of numbers" if nested else "numbers"
        raise UserError(
            f"{where}: column {field.name} is not a list of {kind}; the file is damaged or of"
            " another format"
        )
    values = np.asarray(flat.to_numpy(zero_copy_only=False))
    if not nested:
        return values
    if len(np.unique(rows.value_lengths().to_numpy(zero_copy_only=False))) > 1:
        raise UserError(
            f"{where}: the tokens of column {field.name} have different numbers of values; remove"
            " the row"
        )
    return values.reshape(len(rows), -1) if len(rows) else values.reshape(0, 0)


def _numeric(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))
