"""Open the tree of a store by its path or URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from store.errors import StoreError
from store.hdf5_tree import Hdf5Source
from store.tree import Source
from store.zarr_tree import ZarrSource


def open_source(path: str | Path, storage_options: dict[str, Any] | None = None) -> Source:
    """A Zarr folder, an HDF5 file, or an fsspec URL of a Zarr store. Raises StoreError."""
    if "://" in str(path):
        source = ZarrSource(str(path).rstrip("/"), storage_options)
        if not source.has("zarr.json"):
            raise StoreError(f"{path}: there is no Zarr store (no zarr.json); check the address")
        return source
    target = Path(path)
    if not target.exists():
        raise StoreError(f"{path}: no such file or folder; run teacher-dump first")
    if target.is_dir():
        if not (target / "zarr.json").is_file():
            raise StoreError(f"{path}: not a feature store (a folder without zarr.json)")
        return ZarrSource(str(target))
    with target.open("rb") as file:
        if file.read(8) != b"\x89HDF\r\n\x1a\n":
            raise StoreError(f"{path}: not a feature store (neither a Zarr folder nor HDF5)")
    return Hdf5Source(str(target))
