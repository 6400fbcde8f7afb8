"""Bytes on the disk of an unfinished store, array by array."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from teachonce.store.containers.hdf5 import file as hdf5
from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.paths import local_staging_of
from teachonce.store.containers.zarr import tree as zarr
from teachonce.store.format.layout import ArraySpec

METADATA = ""
"""Stands for what belongs to no array: groups, attributes, indices."""


def stored_sizes(path: Path, part: int | None = None) -> dict[str, int]:
    """Return the bytes of every array of a part, by its path in the part, and METADATA.

    Where `part` is None they are of what lies outside the parts.
    """
    staging = local_staging_of(path)
    if isinstance(staging, Hdf5Staging):
        file = path if part is None else staging.parts / f"{part}.h5"
        sizes = dict(_datasets(file, "" if part is None else f"parts/{part}/"))
        whole = file.stat().st_size
    else:
        folder = path if part is None else path / "parts" / str(part)
        sizes = dict(_chunks(folder, below="parts" if part is None else None))
        whole = sizes.pop(METADATA, 0) + sum(sizes.values())
    return {**sizes, METADATA: whole - sum(sizes.values())}


def stored_rows(path: Path, spec: ArraySpec, rows: int) -> int:
    """Return how many rows an array of so many takes on the disk: chunks that are not compressed
    are written whole."""
    if not spec.per_token or spec.packing is not None:
        return rows
    chunk = hdf5.TOKEN_ROWS if path.suffix == ".h5" else zarr.TOKEN_ROWS
    return rows if rows < chunk else -(-rows // chunk) * chunk


def _datasets(file: Path, prefix: str) -> Iterator[tuple[str, int]]:
    with closing(Hdf5Source(str(file))) as source:
        for name in source.arrays():
            yield name.removeprefix(prefix), source.stored_bytes(name)


def _chunks(folder: Path, below: str | None) -> Iterator[tuple[str, int]]:
    """Yield the bytes of the chunks of each array, then those of all metadata."""
    metadata = 0
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if not file.is_file() or inside.parts[0] == below:
            continue
        metadata += file.stat().st_size if file.name == "zarr.json" else 0
    for node in sorted(folder.rglob("zarr.json")):
        name = node.parent.relative_to(folder).as_posix()
        chunks = node.parent / "c"
        if name.split("/")[0] != below and chunks.exists():
            files = [chunks] if chunks.is_file() else chunks.rglob("*")
            yield name, sum(file.stat().st_size for file in files if file.is_file())
    yield METADATA, metadata
