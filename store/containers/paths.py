"""Choose the container of a path to read (Zarr folder, HDF5 file, URL) or to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from teachonce.store.containers.bucket import is_bucket
from teachonce.store.containers.bucket_staging import BucketStaging
from teachonce.store.containers.hdf5.blocks import SUPERBLOCK
from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.interface import Staging, StoreSource
from teachonce.store.containers.not_a_store import not_a_store
from teachonce.store.containers.zarr.staging import ZarrStaging
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import NO_QUEUE, StoreError, missing
from teachonce.support.errors import UserError, os_error_line

LocalStaging = ZarrStaging | Hdf5Staging


def open_source(path: str | Path, storage_options: dict[str, Any] | None) -> StoreSource:
    """Open a Zarr folder, an HDF5 file, or the fsspec URL of a Zarr store, without a request yet.
    Raises StoreError."""
    _, is_url, address = str(path).partition("://")
    if is_url:
        if not address.strip("/"):
            raise StoreError(
                f"{path}: an address is missing after ://; give the URL of a .zarr folder, such as"
                " s3://bucket/store.zarr"
            )
        return ZarrSource(str(path).rstrip("/"), storage_options)
    path = Path(path)
    try:
        if not path.exists():
            raise StoreError(missing(path))
        if (path / "zarr.json").is_file():
            return ZarrSource(str(path))
        # The content decides, because a file that is only read may have any name. Opening a pipe
        # waits for its writer.
        if path.is_file():
            with path.open("rb") as file:
                if file.read(8) == SUPERBLOCK:
                    return Hdf5Source(str(path))
        raise not_a_store(path)
    except OSError as error:
        error.filename = error.filename or path  # an error of reading an open file has none
        raise StoreError(os_error_line(error)) from error


def staging_of(path: str | Path) -> Staging:
    """Choose the format to write by the name of a store, on a disk or in a bucket.

    Raises UserError as `local_staging_of` does, and for a URL that does not name a bucket.
    """
    if not is_bucket(path):
        return local_staging_of(path)
    _, _, key = str(path).partition("://")[2].rstrip("/").partition("/")  # of the bucket
    if not key.endswith(".zarr"):
        raise UserError(
            f"{path}: in a bucket, a store needs a name, which must end in .zarr (Zarr v3), such as"
            " s3://bucket/store.zarr"
        )
    return BucketStaging(str(path))


def local_staging_of(path: str | Path) -> LocalStaging:
    """Choose the format to write by the name of a store on a disk.

    Raises UserError if the name does not end in .zarr or .h5, and if the path exists and is neither
    a folder nor a file.
    """
    target = Path(path)
    if "://" in str(path):
        raise UserError(
            f"{path}: a store can be changed only at a local path, and written only to a local path"
            " or a bucket (s3://, gs://, az://); give such a path"
        )
    # Opening a pipe would wait for its other end.
    if target.exists() and not (target.is_dir() or target.is_file()):
        raise UserError(f"{path}: is not a folder or an ordinary file; give another name")
    if target.suffix == ".zarr":
        return ZarrStaging(target)
    if target.suffix == ".h5":
        # A rename would replace a link, and leave the file to which it leads as it was.
        return Hdf5Staging(Path(os.path.realpath(target)) if target.is_symlink() else target)
    raise UserError(f"{path}: the name of a store must end in .zarr (Zarr v3) or .h5 (HDF5)")


def queue_of(path: str | Path) -> Path:
    """Return the folder in which processes that write one store together find its parts (FORMAT.md,
    section 9). Raises UserError for a bucket, which has no such folder."""
    if "://" in str(path):
        raise UserError(f"{path}: {NO_QUEUE}")
    # Processes that reach the store through different links must share one queue.
    store = Path(path).resolve()
    return store.parent / f".{store.name}.queue"
