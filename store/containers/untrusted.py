"""Checks of stores from strangers: no link out of the store, no array that exhausts the memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py

from store.containers.hdf5.chunks import BLOSC, FLETCHER, filters_of
from store.errors import StoreError

MAX_JSON = 2**25  # takes some 30 times its bytes when it is read
MAX_CHUNK = 2**30
MAX_RATIO = 2**15  # a chunk of equal bytes shrinks to some 60; real ones do not come near
SMALL = 2**26  # decoded bytes that any array may have
JSON_RATIO, JSON_SMALL = 16, 2**20  # of the manifest: half of it is checksums, and nothing shrinks


class Folder:
    """Checks that names in a folder are ordinary files inside it.

    A link could lead to any file of this machine, and reading a pipe would never end.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._inside = {""}  # folders under the root that were looked at

    def check(self, name: str, limit: int | None = None) -> None:
        """Raise StoreError if `name` exists and is not an ordinary file (of at most `limit` bytes)
        inside the folder."""
        self._enter(name.rpartition("/")[0])
        path = os.path.join(self.root, name)
        try:
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                self._check_link(name)
                found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise StoreError(f"{self.root}: {name} cannot be opened ({error})") from error
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{self.root}: {name} is not an ordinary file; it is damaged")
        if limit is not None and found.st_size > limit:
            raise StoreError(f"{self.root}: {name} is larger than {limit:,} bytes")

    def _enter(self, folder: str) -> None:
        """Raise StoreError if the path of a folder leads out of the store."""
        if folder in self._inside:
            return
        parent, _, last = folder.rpartition("/")
        self._enter(parent)
        if last == ".." or os.path.isabs(folder) or os.path.islink(os.path.join(self.root, folder)):
            self._check_link(folder)
        self._inside.add(folder)

    def _check_link(self, name: str) -> None:
        real = os.path.realpath(os.path.join(self.root, name))
        if not real.startswith(os.path.join(os.path.realpath(self.root), "")):
            raise StoreError(
                f"{self.root}: {name} is a link out of the store, which is not followed: copy the"
                " store with its files (cp -rL)"
            )


def files_under(root: str) -> Iterator[str]:
    """Paths of all files under a folder, relative to it; a link to a folder counts as a file."""
    for folder, names, files in os.walk(root):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            yield Path(folder, name).relative_to(root).as_posix()


def check_size(where: str, decoded: int, chunk: int, stored: int, is_json: bool = False) -> None:
    """Raise StoreError if `stored` bytes cannot honestly decode to `decoded` bytes.

    A few bytes can declare a shape that no memory holds, so this runs before anything is allocated.
    """
    limit = SMALL + MAX_RATIO * stored
    allowed = JSON_SMALL + JSON_RATIO * stored if is_json else limit
    if chunk > min(MAX_CHUNK, limit) or decoded > allowed:
        raise StoreError(
            f"{where}: declares {decoded:,} bytes (in chunks of {chunk:,}), but {stored:,} bytes"
            " are stored; the store is damaged"
        )


def check_links(file: h5py.File, name: str, where: str) -> None:
    """Raise StoreError if a step of the path is not an ordinary link within this HDF5 file;
    KeyError if there is no such path."""
    segments = [segment for segment in name.split("/") if segment]
    for depth in range(1, len(segments) + 1):
        path = "/".join(segments[:depth])
        if file.id.links.get_info(path.encode()).type != h5py.h5l.TYPE_HARD:
            raise StoreError(f"{where}: {path} is a link, which is not followed; dump again")


def check_dataset(dataset: h5py.Dataset, where: str) -> None:
    """Raise StoreError if a dataset keeps its values in other files, or declares an impossible
    size."""
    if dataset.external or dataset.is_virtual or dataset.dtype.hasobject:
        raise StoreError(f"{where}: has its values elsewhere, which is not followed; dump again")
    if foreign := set(filters_of(dataset)) - {BLOSC, FLETCHER}:
        raise StoreError(
            f"{where}: HDF5 filter {min(foreign)} has no place in a store (only {BLOSC},"
            " Blosc, and Fletcher-32); the store is damaged"
        )
    chunk = dataset.dtype.itemsize
    for size in dataset.chunks or ():
        chunk *= int(size)
    stored, is_json = int(dataset.id.get_storage_size()), dataset.name == "/manifest"
    check_size(where, int(dataset.nbytes), chunk, stored, is_json)


def attribute(attributes: Any, key: str) -> Any:
    """Read an HDF5 attribute that is a fixed-length text or a whole number. Raises ValueError."""
    stored = attributes.get_id(key)
    if stored.shape != () or stored.dtype.kind not in "Siu" or stored.dtype.itemsize > MAX_JSON:
        raise ValueError(f"{stored.dtype}{list(stored.shape)} is neither a text nor a whole number")
    value = attributes[key]
    return value.decode("ascii", "replace") if stored.dtype.kind == "S" else int(value)
