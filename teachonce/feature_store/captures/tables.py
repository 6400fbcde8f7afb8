"""Read tables row by row: Parquet files and folders of `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.feature_store.captures.files import numbered, regular
from teachonce.feature_store.captures.schema import Numbers
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line
from teachonce.support.json_file import read_small

END = b"\xff\xff\xff\xff\0\0\0\0"  # the end marker of an Arrow stream
STATE, SPLITS = "state.json", "dataset_dict.json"
BATCH = 64  # rows in memory at a time; a long sequence takes a few MB


@dataclass(frozen=True)
class Table:
    """The files of one table, Arrow or Parquet, and its columns."""

    path: Path
    files: list[Path]
    columns: tuple[str, ...]
    schema: Any

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the location of each row, for messages, and its cells as Arrow scalars.

        Raises UserError.
        """
        for path in self.files:
            number, batches = 0, _batches(path, columns)
            # Each step is wrapped, because Arrow may find damage only when it reads a batch.
            while batch := _with_arrow(path, partial(next, batches, None)):
                cells = [batch.column(name) for name in columns]
                for row in range(batch.num_rows):
                    values = {n: c[row] for n, c in zip(columns, cells, strict=True)}
                    yield f"{path}, row {number}", values
                    number += 1


def _with_arrow(path: Path, read: Callable[[], Any]) -> Any:
    """Call a function that reads with Arrow. Raises UserError if it fails."""
    try:
        return read()
    except UserError:
        raise
    except Exception as error:  # the library raises errors of any kind for a bad file
        raise UserError(f"{path}: cannot be read ({first_line(error)}); copy it again") from None


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            left = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=BATCH, columns=columns):
                left -= batch.num_rows
                yield batch
            if left:  # pyarrow accepts row groups with fewer rows than the metadata declare
                raise UserError(f"{path}: has {left:,} rows less than it declares; copy it again")
        return
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        for batch in pyarrow.ipc.open_stream(file):
            batch.validate(full=True)  # a forged file may have offsets outside its buffers
            yield batch


def open_table(path: Path) -> Table | None:
    """Open a Parquet file, a folder of Parquet files, or a folder of `datasets`.

    Returns None for other paths. Raises UserError for a table that cannot be read, and for a folder
    with several splits.
    """
    if path.is_dir() and (path / SPLITS).is_file():
        splits = [found for found in sorted(path.iterdir()) if (found / STATE).is_file()]
        if len(splits) != 1:
            names = " or ".join(str(found) for found in splits) or "none is complete"
            raise UserError(f"{path}: a folder of several splits; give one of them: {names}")
        path = splits[0]
    files = regular(_files_of(path))
    if not files:
        return None
    schema = _schema(files[0])
    columns = tuple(schema.names)
    # Arrow cannot look a column up by a name that occurs twice.
    if len(set(columns)) < len(columns):
        raise UserError(
            f"{files[0]}: two columns have the same name: {', '.join(columns)}; rename one"
        )
    for other in files[1:]:
        if _types(_schema(other)) != _types(schema):
            raise UserError(
                f"{other}: its columns are {_types(_schema(other))}, and the columns of {files[0]}"
                f" {_types(schema)}; remove the files that belong to another table"
            )
    return Table(path, files, columns, schema)


def _types(schema: Any) -> str:
    """Describe the columns and their types, sorted by name."""
    return ", ".join(sorted(f"{field.name} ({field.type})" for field in schema))


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    if not (path / STATE).is_file():
        return numbered(path.glob("*.parquet"))
    try:
        state = json.loads(read_small(path / STATE))
        # Only the last component: a forged name must not lead out of the folder.
        names = [Path(str(each["filename"])).name for each in state["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path / STATE}: cannot be read ({first_line(error)}); copy the folder again"
        ) from None
    if not names:
        raise UserError(f"{path / STATE}: names no file of a table; copy the folder again")
    return [path / name for name in names]


def _schema(path: Path) -> Any:
    def read() -> Any:
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
        raise UserError(f"{path}: has no end: the file was cut off; copy it again")

    def read_and_check() -> Any:
        schema = read()
        _types(schema)  # raises for names that are not UTF-8
        return schema

    return _with_arrow(path, read_and_check)


def first_width(table: Table, field: Numbers) -> int:
    """Return the number of values per token in the first row that has any, of a column of lists.

    Raises UserError if there is none.
    """
    for where, cells in table.rows([field.name]):
        if width := int(numbers(field, cells[field.name], where).shape[1]):
            return width
    raise UserError(f"{table.path}: holds no row; nothing to import")


def numbers(field: Numbers, cell: Any, where: str) -> Array:
    """Return the numbers of a cell: a list, or a list of lists of equal length.

    Raises UserError for any other cell.
    """
    read = vector if len(field.dims) == 1 else matrix
    return field.array(read(cell, where, field.name), where)


def vector(cell: Any, where: str, name: str) -> Array:
    """Return a cell that is a list of numbers as an array [T]. Raises UserError for any other
    cell."""
    values = getattr(cell, "values", None)
    if values is None or values.null_count or not _numeric(values.type):
        raise UserError(f"{where}: column {name} is not a list of numbers")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def matrix(cell: Any, where: str, name: str) -> Array:
    """Return a cell that is a list of lists of equal length as an array [T,B].

    Raises UserError for any other cell.
    """
    rows: Any = getattr(cell, "values", None)
    inner: Any = rows.flatten() if hasattr(rows, "flatten") else None
    known = inner is not None and (_numeric(inner.type) or not len(inner))
    if not known or rows.null_count or inner.null_count:
        raise UserError(f"{where}: column {name} is not a list of lists of numbers")
    flat = np.asarray(inner.to_numpy(zero_copy_only=False))
    lengths = np.unique(np.asarray(rows.value_lengths().to_numpy(zero_copy_only=False)))
    if len(lengths) > 1:
        raise UserError(
            f"{where}: the tokens of column {name} have different numbers of values; remove the row"
        )
    return flat.reshape(len(rows), -1) if len(rows) else flat.reshape(0, 0)


def _numeric(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))
