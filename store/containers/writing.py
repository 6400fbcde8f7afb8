"""How a store is written, by its name; and what is told where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.containers.hdf5.staging import Hdf5Staging
from store.containers.interface import Staging
from store.containers.zarr.staging import ZarrStaging
from store.errors import StoreError
from support import files
from support.errors import UserError


def staging_of(path: str | Path) -> Staging:
    """How a store with this name is written. UserError unless it ends in .zarr or .h5, and what has
    the name, if anything, is a folder or file: to open a pipe is to wait for its other end."""
    target = Path(path)
    if "://" in str(path):
        raise UserError(f"{path}: stores are written to a local path; upload the finished folder")
    if target.exists() and not (target.is_dir() or target.is_file()):
        raise UserError(f"{path}: is not a folder or an ordinary file; give another name")
    if target.suffix == ".zarr":
        return ZarrStaging(target)
    if target.suffix == ".h5":
        return Hdf5Staging(target)
    raise UserError(f"{path}: the name of a store must end in .zarr (Zarr v3) or .h5 (HDF5)")


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """StoreError for whatever a disk refuses: what the cause was, and that parts are kept."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py tells a full disk as RuntimeError
        kept = " (published parts are kept)" if path.exists() else ""
        raise StoreError(
            f"cannot write {what}{path}: {files.reason(error)} and start again with the same"
            f" arguments{kept}"
        ) from error
