"""The files of a capture: listed, hashed, unpacked, loaded within bounds; tables of rows."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, first_line

BLOCK = 1 << 20
MOST_BYTES = 1 << 34  # that one compressed sample may take
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def numbered(paths: Iterable[Path]) -> list[Path]:
    """Sort paths so that `data_10` comes after `data_9`."""

    def key(path: Path) -> list[tuple[int, str]]:
        found = re.findall(r"\d+|\D+", str(path))
        return [(int(part), "") if part.isdigit() else (-1, part) for part in found]

    return sorted(paths, key=key)


def stamps(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return size and time of each file, by which a change is seen."""
    return [(found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files)]


def identity(
    kind: str, source: Path, files: list[Path], progress: Progress = lambda items, unit: items
) -> dict[str, Any]:
    """Describe the files of a capture as JSON: two that are alike give the same samples."""
    digest, size = hashlib.sha256(), 0
    for path in progress(files, "file"):
        inner = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                inner.update(block)
                size += len(block)
        name = path.relative_to(source) if path.is_relative_to(source) else path.name
        digest.update(f"{name} {inner.hexdigest()}\n".encode())
    return {
        "kind": kind,
        "name": source.resolve().name,
        "files": len(files),
        "bytes": size,
        "sha256": digest.hexdigest(),
    }


def unzstd(data: bytes, where: str) -> bytes:
    """Decompress a Zstandard frame. Raises UserError for what is none."""
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
            return _bounded(stream.read(MOST_BYTES + 1), where)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{where}: cannot be decompressed ({first_line(error)})") from None


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise UserError(f"{where}: decompresses to more than {MOST_BYTES:,} bytes; is not read")
    return data


def gunzip(path: Path) -> bytes:
    """Decompress a .gz file. Raises UserError for what is none."""
    try:
        with gzip.open(path, "rb") as file:
            return _bounded(file.read(MOST_BYTES + 1), str(path))
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be decompressed ({first_line(error)})") from None


def load_tensors(data: Path | bytes, where: str) -> dict[str, Any]:
    """Load what torch.save wrote of a dictionary, tensors and plain values alone.

    Raises UserError for anything that is pickled besides: nothing of it is run.
    """
    import torch

    source: Any = data if isinstance(data, Path) else io.BytesIO(data)
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # the library raises errors of any kind for a bad file
        told = "weights_only" in str(error) or "Unsupported" in str(error)
        raise UserError(
            f"{where}: holds pickled objects other than tensors, which could run code of a stranger"
            " and are not read; save tensors alone"
            if told
            else f"{where}: cannot be read as tensors ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"{where}: holds a {type(found).__name__}, expected a dictionary of tensors"
        )
    return found


STATE, SPLITS = "state.json", "dataset_dict.json"
BATCH = 64  # rows that are in memory at once; of long sequences a few MB each


@dataclass(frozen=True)
class Table:
    """The files of one table, Arrow or Parquet, and its columns."""

    path: Path
    files: list[Path]
    columns: tuple[str, ...]
    schema: Any

    def rows(self, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where each row stands, and its cells as Arrow scalars. Raises UserError."""
        for path in self.files:
            number = 0
            try:
                for batch in _batches(path, columns):
                    cells = [batch.column(name) for name in columns]
                    for row in range(batch.num_rows):
                        values = {n: c[row] for n, c in zip(columns, cells, strict=True)}
                        yield f"{path}, row {number}", values
                        number += 1
            except _arrow_errors() as error:
                raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError)


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH, columns=columns)
        return
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        yield from pyarrow.ipc.open_stream(file)


def open_table(path: Path) -> Table | None:
    """Open a Parquet file, a folder of them, or a folder of `datasets`; None where it is none.

    Raises UserError for one that cannot be read, and for a folder of several splits.
    """
    if path.is_dir() and (path / SPLITS).is_file():
        splits = [found for found in sorted(path.iterdir()) if (found / STATE).is_file()]
        if len(splits) != 1:
            names = " or ".join(str(found) for found in splits) or "none that is whole"
            raise UserError(f"{path}: a folder of several splits; give one of them: {names}")
        path = splits[0]
    files = _files_of(path)
    if not files:
        return None
    try:
        schema = _schema(files[0])
    except _arrow_errors() as error:
        raise UserError(f"{files[0]}: cannot be read ({first_line(error)})") from None
    return Table(path, files, tuple(schema.names), schema)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    if not (path / STATE).is_file():
        return numbered(path.glob("*.parquet"))
    try:
        state = json.loads((path / STATE).read_text("utf-8"))
        names = [Path(str(each["filename"])).name for each in state["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path / STATE}: cannot be read ({first_line(error)})") from None
    return [path / name for name in names]


def _schema(path: Path) -> Any:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(path)
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        return pyarrow.ipc.open_stream(file).schema


def vector(cell: Any, where: str, name: str) -> Array:
    """Return a cell that is a list of numbers as an array [T]. Raises UserError for another."""
    values = getattr(cell, "values", None)
    if values is None or values.null_count or not _numeric(values.type):
        raise UserError(f"{where}: column {name} is no list of numbers")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def matrix(cell: Any, where: str, name: str) -> Array:
    """Return a cell that is a list of lists as long as each other as an array [T,B].

    Raises UserError for another.
    """
    rows: Any = getattr(cell, "values", None)
    inner: Any = rows.flatten() if hasattr(rows, "flatten") else None
    known = inner is not None and (_numeric(inner.type) or not len(inner))
    if not known or rows.null_count or inner.null_count:
        raise UserError(f"{where}: column {name} is no list of lists of numbers")
    flat = np.asarray(inner.to_numpy(zero_copy_only=False))
    lengths = np.unique(np.asarray(rows.value_lengths().to_numpy(zero_copy_only=False)))
    if len(lengths) > 1:
        raise UserError(f"{where}: the tokens of column {name} have not all as many values")
    return flat.reshape(len(rows), -1) if len(rows) else flat.reshape(0, 0)


def _numeric(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))
