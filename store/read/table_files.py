"""Write a store's table to files: Parquet, and the Arrow files of `datasets`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from teachonce.store.errors import StoreError
from teachonce.store.read.arrow import StoreTable
from teachonce.support import files

if TYPE_CHECKING:
    import datasets

ROW_GROUP_BYTES = 2**26  # of a row group in memory
SUFFIX = ".parquet"


def check_free(path: Path) -> None:
    """Raise StoreError if the path exists."""
    if path.exists():
        raise StoreError(f"{path}: exists already; remove it, or choose another name")


def write_parquet(
    table: StoreTable, path: Path, file_bytes: int, on_rows: Callable[[int], object]
) -> list[Path]:
    """Write a table to a file, or to files of about `file_bytes` each in a new folder.

    Returns their paths. See `FeatureStore.to_parquet`, which has called `check_free`. Raises
    StoreError if a file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_path(path) as new:
            if path.suffix == SUFFIX:
                _write(table.batches(), table, new, None, on_rows)
                return [path]
            new.mkdir()
            names = _write_several(table, new, file_bytes, on_rows)
        return [path / name for name in names]
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {files.reason(error)}") from error


def _write_several(
    table: StoreTable, folder: Path, file_bytes: int, on_rows: Callable[[int], object]
) -> list[str]:
    names, batches = list[str](), table.batches()
    # A file starts only if another batch exists, so none is empty.
    for first in batches:
        names.append(f"{len(names):05}{SUFFIX}")
        _write(chain([first], batches), table, folder / names[-1], file_bytes, on_rows)
    return names


def _write(
    batches: Iterator[Any],
    table: StoreTable,
    path: Path,
    limit: int | None,
    on_rows: Callable[[int], object],
) -> None:
    """Write batches to a file until there are no more, or the file has about `limit` bytes."""
    with path.open("wb") as file, pq.ParquetWriter(file, table.schema, compression="zstd") as out:
        group, size = list[Any](), 0

        def flush() -> None:
            if group:
                # Row groups are cut by bytes, not by pyarrow's limit of rows.
                out.write_table(pa.Table.from_batches(group), row_group_size=2**31 - 1)
                on_rows(sum(len(batch) for batch in group))
                group.clear()

        for batch in batches:
            group.append(batch)
            # Not a sum over the group, which has thousands of batches if columns are narrow.
            size += batch.nbytes
            if size >= ROW_GROUP_BYTES:
                flush()
                size = 0
            if limit is not None and file.tell() + size >= limit:
                break
        flush()


def dataset_of(
    table: StoreTable,
    content: str,
    folder: Path | None,
    on_path: Callable[[Path], object],
) -> datasets.Dataset:
    """Open a table as a dataset in `folder`, by default in the cache of `datasets`.

    See `rows_in` and `FeatureStore.to_datasets`. Raises StoreError if the folder cannot be written.
    """
    import datasets

    folder = folder or Path(datasets.config.HF_DATASETS_CACHE) / "teachonce"
    try:
        return rows_in(folder, table, content, on_path)
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be written: {files.reason(error)}, or name another cache_dir"
        ) from error


def rows_name(content: str, schema: pa.Schema) -> str:
    """Return the name, without suffix, of the Arrow file that caches a store's content with this
    schema."""
    key = json.dumps([content, schema.names, str(schema)])
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def rows_in(
    folder: Path,
    table: StoreTable,
    content: str,
    on_path: Callable[[Path], object] = lambda path: None,
) -> datasets.Dataset:
    """Open a table as a dataset: an Arrow file in `folder`, memory-mapped, and reused if it exists.

    on_path: called with the file's path before it is written. Raises OSError.
    """
    import datasets

    path = folder / f"{rows_name(content, table.schema)}.arrow"
    on_path(path)
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is a file of its own, because the Arrow file appears only by the final rename.
    locked = files.open_ordinary(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    with os.fdopen(locked, "wb"):  # another process may be writing it
        files.lock(locked, wait=True)
        if not path.exists():
            with files.atomic_path(path) as new, pa.ipc.new_stream(str(new), table.schema) as out:
                for batch in table.batches():
                    out.write_batch(batch)
    return datasets.Dataset.from_file(str(path))


def streamed_dataset_of(
    make: Callable[[], StoreTable],
) -> datasets.IterableDataset:
    """Open a table as a dataset that reads the store on each iteration.

    make: makes the table, also in worker processes. See `FeatureStore.to_datasets`.
    """
    import datasets

    table = make()
    return datasets.IterableDataset.from_generator(
        _examples,
        features=datasets.Features.from_arrow_schema(table.schema),
        gen_kwargs={"blocks": table.blocks().tolist(), "make": make},  # workers share a list
    )


def _examples(blocks: list[list[int]], make: Callable[[], StoreTable]) -> Iterator[dict[str, Any]]:
    for batch in make().batches(np.array(blocks)):
        yield from batch.to_pylist()
