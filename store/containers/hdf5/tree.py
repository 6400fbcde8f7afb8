"""Read the tree of a store from an HDF5 file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers filter 32001
import numpy as np

from store.containers.blosc import Damage
from store.containers.hdf5.chunks import BLOSC, FLETCHER, Chunks, filters_of
from store.containers.hdf5.file import DIGEST_BYTES, file_digest
from store.containers.interface import Flaw, Slices
from store.containers.memory_map import prefetch
from store.containers.untrusted import MAX_JSON, check_size
from store.errors import VERIFY, StoreError
from store.format.layout import groups_above, part_number
from support.arrays import Array

OPEN_FILES = 64  # parts of an unfinished store are files: a process may have some 1000 open
LARGE = 2**18  # bytes from which a read is worth decoding by threads
FILE_ALTERED = "the bytes of the file do not match the SHA-256 at its end"


def _check_links(file: h5py.File, name: str, where: str) -> None:
    """Raise StoreError if a step of the path is not an ordinary link within this HDF5 file;
    KeyError if there is no such path."""
    segments = [segment for segment in name.split("/") if segment]
    for depth in range(1, len(segments) + 1):
        path = "/".join(segments[:depth])
        if file.id.links.get_info(path.encode()).type != h5py.h5l.TYPE_HARD:
            raise StoreError(f"{where}: {path} is a link, which is not followed; dump again")


def _check_dataset(dataset: h5py.Dataset, where: str) -> None:
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


def _attribute(attributes: Any, key: str) -> Any:
    """Read an HDF5 attribute that is a fixed-length text or a whole number. Raises ValueError."""
    stored = attributes.get_id(key)
    if stored.shape != () or stored.dtype.kind not in "Siu" or stored.dtype.itemsize > MAX_JSON:
        raise ValueError(f"{stored.dtype}{list(stored.shape)} is neither a text nor a whole number")
    value = attributes[key]
    return value.decode("ascii", "replace") if stored.dtype.kind == "S" else int(value)


def read_attributes(group: h5py.Group, where: str) -> dict[str, Any]:
    """Read attributes as `write_attributes` wrote them. Raises StoreError naming `where`."""
    values: dict[str, Any] = {}
    for key in group.attrs:
        try:
            value = _attribute(group.attrs, key)
            is_json = isinstance(value, str) and value[:1] in ("{", "[")
            values[key] = json.loads(value) if is_json else value
        except Exception as error:  # h5py raises many kinds for types it does not know
            raise StoreError(f"{where}: attribute {key} cannot be read ({error})") from error
    return values


class Hdf5Slices:
    """Slices of rows of an HDF5 dataset."""

    def __init__(self, source: Hdf5Source, name: str) -> None:
        self._source, self._name = source, name
        self._begun: set[int] = set()  # chunks that the disk was told of
        self._open()
        self.shape, self.dtype = tuple(self._dataset.shape), self._dataset.dtype

    def _open(self) -> None:
        with self._source.guard:
            self._dataset = self._source.dataset(self._name)
            self._file: str = self._dataset.file.filename
            self._chunks = Chunks.of(self._dataset)
            self._opened = self._source.generation

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        out = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.read_into(begin, end, out)
        return out

    def _current(self) -> h5py.Dataset:
        if self._source.current() != self._opened:
            self._open()
        return self._dataset

    def read_into(self, begin: int, end: int, out: Array) -> None:
        if out.nbytes >= LARGE and self._decoded(begin, end, out):
            return
        with self._source.guard:
            dataset = self._current()
            if begin >= end:
                return
            try:
                space = dataset.id.get_space()  # what read_direct does, in half the time
                space.select_hyperslab((begin, *(0,) * (out.ndim - 1)), out.shape)
                dataset.id.read(h5py.h5s.create_simple(out.shape), space, out)
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                raise StoreError(
                    f"{self._source.path}: array {self._name}: rows {begin}..{end} cannot be "
                    f"decoded ({error}); {VERIFY}"
                ) from error

    def _decoded(self, begin: int, end: int, out: Array) -> bool:
        """Decode whole chunks outside the lock, so that threads share the work.

        Returns False where HDF5 must decode: for parts of chunks, and for damaged ones, which it
        reports.
        """
        chunks, length = self._chunks, self.shape[0]
        if chunks is None or out.dtype != self.dtype or not out.flags.c_contiguous:
            return False
        if begin % chunks.rows or (end % chunks.rows and end != length):
            return False
        target, row = out.reshape(-1).view(np.uint8), out.nbytes // (end - begin)
        for first in range(begin, end, chunks.rows):
            low, high = first - begin, min(first + chunks.rows, end) - begin
            try:
                with self._source.guard:
                    where = (first, *(0,) * (out.ndim - 1))
                    skipped, stored = self._current().id.read_direct_chunk(where)
                chunks.decode(
                    skipped, np.frombuffer(stored, np.uint8), target[low * row : high * row]
                )
            except (Damage, OSError, RuntimeError, ValueError, KeyError):
                return False
        return True

    def prefetch(self, begin: int, end: int) -> None:
        with self._source.guard, suppress(OSError, RuntimeError, ValueError, KeyError):
            dataset = self._current()
            rows = dataset.chunks[0] if dataset.chunks else 0
            chunks = range(begin // rows, -(-end // rows)) if rows else range(0)
            if self._begun.issuperset(chunks):
                return
            self._begun.update(chunks)
            first, last = (
                dataset.id.get_chunk_info_by_coord((chunk * rows, *(0,) * (dataset.ndim - 1)))
                for chunk in (chunks[0], chunks[-1])
            )
            # A dataset is written at once: its chunks follow one another.
            size = last.byte_offset + last.size - first.byte_offset
            prefetch(self._file, first.byte_offset, size)


def _has(members: Mapping[str, set[str]], path: str) -> bool:
    parent, _, leaf = path.rpartition("/")
    return leaf in members[parent]


def _stranger(path: str) -> str:
    if (number := part_number(path.removeprefix("parts/"))) is not None:
        return f"extra part {number}, which is not in the manifest"
    return f"extra object {path}"


class Hdf5Source:
    """Reads an HDF5 store. Parts of an unfinished store lie beside it, in `<path>.parts/`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.options: dict[str, Any] | None = None
        self.generation: tuple[int, int] = (os.getpid(), 0)
        self._guard = threading.RLock()
        self._files: dict[Path, h5py.File] = {}

    def current(self) -> tuple[int, int]:
        """The process and how often files were closed: an HDF5 handle must never be used after a
        fork."""
        if self.generation[0] != os.getpid():
            self._files, self._guard = {}, threading.RLock()
            self.generation = (os.getpid(), self.generation[1])
        return self.generation

    @property
    def guard(self) -> threading.RLock:
        """The lock that lets one thread at a time use HDF5; new after a fork, as an inherited one
        may never be released."""
        self.current()
        return self._guard

    def _file(self, name: str) -> h5py.File:
        self.current()
        segments = name.split("/")
        if segments[0] == "parts" and len(segments) > 1 and self._unfinished():
            part = Path(f"{self.path}.parts") / f"{segments[1]}.h5"
            if part.is_file():
                return self._handle(part)
        return self._handle(Path(self.path))

    def _handle(self, path: Path) -> h5py.File:
        with self.guard:
            if path not in self._files:
                if len(self._files) >= OPEN_FILES:
                    self.close()  # what is still used is opened again
                try:
                    self._files[path] = h5py.File(path, "r")
                except OSError as error:
                    raise StoreError(f"{path}: not a readable HDF5 file ({error})") from error
            return self._files[path]

    def _unfinished(self) -> bool:
        """Whether parts lie in files beside this one; files beside a sealed store do not belong to
        it."""
        with self.guard:
            try:
                state = _attribute(self._handle(Path(self.path)).attrs, "state")
                return bool(state == "writing")
            except (OSError, RuntimeError, KeyError, TypeError, ValueError):
                return False

    def _object(self, name: str, kind: type) -> Any:
        with self.guard:
            try:
                file = self._file(name)
                _check_links(file, name, self.path)
                found = file[name or "/"]
                if isinstance(found, h5py.Dataset):
                    _check_dataset(found, f"{self.path}: array {name}")
            except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise StoreError(
                    f"{self.path}: {name} is missing or unreadable ({error}); the store is damaged"
                ) from error
        if not isinstance(found, kind):
            raise StoreError(f"{self.path}: {name} is not a {kind.__name__.lower()}")
        return found

    def dataset(self, name: str) -> h5py.Dataset:
        """Open a dataset by its path."""
        return self._object(name, h5py.Dataset)

    def attributes(self, group: str = "") -> dict[str, Any]:
        try:
            with self.guard:
                return read_attributes(self._object(group, h5py.Group), f"{self.path}: {group}")
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{self.path}: attributes of '{group}/': {error}") from error

    def members(self, group: str) -> list[str]:
        folder = Path(f"{self.path}.parts")
        if group == "parts" and folder.is_dir() and self._unfinished():
            return sorted(file.stem for file in folder.glob("*.h5"))
        try:
            return sorted(self._object(group, h5py.Group))
        except StoreError:
            return []

    def array(self, name: str) -> Slices:
        return Hdf5Slices(self, name)

    def fingerprint(self, name: str) -> str | None:
        return None

    def unlawful(self, name: str) -> str | None:
        with self.guard:
            dataset = self.dataset(name)
            checked = not dataset.size or FLETCHER in filters_of(dataset)
        return None if checked else "chunks without Fletcher-32"

    def flaws(self, arrays: Collection[str]) -> list[Flaw]:
        children: dict[str, set[str]] = {}
        for name in arrays:
            for path in (*groups_above(name), name):
                parent, _, leaf = path.rpartition("/")
                children.setdefault(parent, set()).add(leaf)
        there = {group: set(self.members(group)) for group in children}
        missing = [name for name in sorted(arrays) if not _has(there, name)]
        strangers = [
            f"{group}/{name}".lstrip("/")
            for group in sorted(children)
            for name in sorted(there[group] - children[group])
        ]
        flaws = [Flaw(f"missing array {name}", name) for name in missing]
        flaws += [Flaw(_stranger(name), name, stranger=True) for name in strangers]
        whole = Path(self.path)
        end = whole.stat().st_size - DIGEST_BYTES
        with whole.open("rb") as file:
            file.seek(max(0, end))
            # Whoever added a stranger has altered the file, and need not have damaged anything.
            if file.read() != file_digest(whole, end) and not strangers:
                flaws.append(Flaw(FILE_ALTERED, ""))
        return flaws

    def damaged_chunks(self, name: str) -> list[int]:
        dataset, bad = self.dataset(name), []
        rows = dataset.chunks[0] if dataset.chunks else max(1, dataset.shape[0])
        for number in range(-(-dataset.shape[0] // rows)):
            try:
                dataset[number * rows : (number + 1) * rows]
            except (OSError, RuntimeError):
                bad.append(number)
        return bad

    def close(self) -> None:
        with self.guard:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self.generation = (os.getpid(), self.generation[1] + 1)
