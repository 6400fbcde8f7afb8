"""Choose the container of a path to read (Zarr folder, HDF5 file, URL) or to write, and describe
what a path without a store is instead."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

from teachonce.store.containers.bucket import is_bucket
from teachonce.store.containers.bucket_staging import BucketStaging
from teachonce.store.containers.hdf5.blocks import SUPERBLOCK
from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.interface import Staging, StoreSource
from teachonce.store.containers.zarr.staging import ZarrStaging
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import NO_QUEUE, NO_STORE, StoreError, missing
from teachonce.support.errors import UserError, os_error_line
from teachonce.support.parsing import AS_TEXT, local_path

LocalStaging = ZarrStaging | Hdf5Staging


def open_source(path: str | Path, storage_options: dict[str, Any] | None) -> StoreSource:
    """Open a Zarr folder, an HDF5 file, or the fsspec URL of a Zarr store, without a request yet.
    Raises StoreError, and UserError for a URL that is a Path."""
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
            raise StoreError(missing(local_path(path, AS_TEXT)))
        if (path / "zarr.json").is_file():
            return ZarrSource(str(path))
        # The content decides, because a file that is only read may have any name. Opening a pipe
        # waits for its writer.
        if path.is_file():
            with path.open("rb") as file:
                if file.read(8) == SUPERBLOCK:
                    return Hdf5Source(str(path))
        problem, remedy = _folder(path) if path.is_dir() else _file(path)
        raise StoreError(f"{path}: not a feature store ({problem}); {remedy}")
    except OSError as error:
        error.filename = error.filename or path  # an error while reading an open file has no name
        raise StoreError(os_error_line(error)) from error


def staging_of(path: str | Path) -> Staging:
    """Choose the format to write by the name of a store, on a disk or in a bucket.

    Raises UserError as `local_staging_of` does, and for a URL that does not name a bucket.
    """
    if not is_bucket(path):
        return local_staging_of(path)
    check_url_name(str(path))
    return BucketStaging(str(path))


def check_url_name(url: str) -> None:
    """Raise UserError unless a URL ends in the name of a Zarr store. The name of a bucket alone is
    not the name of a store."""
    name = url.partition("://")[2].rstrip("/")
    if is_bucket(url):
        name = name.partition("/")[2]
    if not name.endswith(".zarr"):
        raise UserError(
            f"{url}: at a URL, a store needs a name, which must end in .zarr (Zarr v3), such as"
            " s3://bucket/store.zarr"
        )


def local_staging_of(path: str | Path) -> LocalStaging:
    """Choose the format to write by the name of a store on a disk.

    Raises UserError if the name does not end in .zarr or .h5, and if the path exists and is neither
    a folder nor a file.
    """
    if "://" in str(path):
        raise UserError(
            f"{path}: a store can be changed only at a local path, and written only to a local path"
            " or a bucket (s3://, gs://, az://); give such a path"
        )
    target = local_path(path, AS_TEXT)
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


OPENED = 512  # bytes of a file that are looked at
SHOWN = 3  # names of stores in a folder that a message lists
ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
DUMP = "a store is written by `teacher-dump --model MODEL --corpus CORPUS --out NAME.zarr`"


def _folder(path: Path) -> tuple[str, str]:
    typed = shlex.quote(str(path))
    if (path / "config.json").is_file() or (path / "modules.json").is_file():
        return "the folder of a model", (
            "give the store that a teacher wrote: `teacher-dump"
            f" --model {typed} --corpus CORPUS --out NAME.zarr`, if this model is the teacher"
        )
    if (path / "runs.json").is_file():
        return "the folder of a sweep", "give the store that its students are trained on"
    if (path / "training.json").is_file():
        return "the folder of a training", "give the store that the student is trained on"
    if path.name.endswith(".h5.parts"):
        store = path.with_name(path.name.removesuffix(".parts"))
        return "the parts of an unfinished store", f"give {store}"
    if re.search(r"\.aside-\d+$", path.name):
        return "the quarantine folder of a repair", "give the store itself"
    if (path / "parts").is_dir():  # only the root is missing, as in a copy that was stopped
        return "a folder without zarr.json", NO_STORE
    stores = sorted(entry.name for entry in path.iterdir() if entry.suffix in (".zarr", ".h5"))
    if stores:
        dots = " ..." if len(stores) > SHOWN else ""
        return f"a folder with {', '.join(stores[:SHOWN])}{dots}", "give one of these"
    return "a folder without zarr.json", NO_STORE if path.suffix == ".zarr" else DUMP


def _file(path: Path) -> tuple[str, str]:
    if not path.is_file():  # opening a pipe waits for its writer
        return "neither a folder nor an ordinary file", DUMP
    if path.suffix == ".h5":
        return "neither a Zarr folder nor HDF5", NO_STORE
    if path.name.lower().endswith(ARCHIVES):
        unpack = "unzip" if path.suffix.lower() == ".zip" else "tar -xf"
        typed = shlex.quote(str(path))
        return "an archive", f"unpack it (`{unpack} {typed}`) and give the store that was in it"
    with path.open("rb") as file:
        start = file.read(OPENED)
    if path.name == "zarr.json":
        return "a file of a store", f"give its folder, {path.parent}"
    if start and _is_text(start):
        typed = shlex.quote(str(path))
        return (
            "a text file",
            f"`teacher-dump --model MODEL --corpus {typed} --out NAME.zarr` makes a store from it",
        )
    return "neither a Zarr folder nor HDF5", DUMP


def _is_text(start: bytes) -> bool:
    text = start.decode("utf-8", "replace").rstrip("\N{REPLACEMENT CHARACTER}")  # a cut last letter
    return "\0" not in text and "\N{REPLACEMENT CHARACTER}" not in text
