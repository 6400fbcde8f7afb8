"""HDF5: the same tree as one file, chunked, with hdf5plugin's Blosc and Fletcher-32."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from store.errors import StoreError
from store.guard import attribute, check_dataset, check_links
from store.hdf5_file import NewFile, create_file
from store.layout import ArraySpec
from store.mapping import prefetch
from store.tree import Array, Slices

TOKEN_ROWS = 1024
CHUNK_BYTES = 2**18
DIGEST_BYTES = 32
FILE_ALTERED = "the bytes of the file do not match the SHA-256 at its end"


def file_digest(path: Path, size: int) -> bytes:
    """SHA-256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, 2**24))):
            digest.update(data)
            size -= len(data)
    return digest.digest()


def append_digest(path: Path) -> None:
    """End a finished file with the SHA-256 of all of it.

    HDF5 ignores what follows its end, and checksums all but the gaps between its objects.
    """
    digest = file_digest(path, path.stat().st_size)
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def create_group(file: h5py.File, name: str) -> h5py.Group:
    """The group of that name, made (with its parents) if it is not there."""
    settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    settings.set_obj_track_times(False)
    parents = name.split("/")
    for depth in range(1, len(parents) + 1):
        path = "/".join(parents[:depth])
        if path and path not in file:
            h5py.h5g.create(file.id, path.encode(), gcpl=settings)
    return file[name or "/"]


def write_attributes(group: h5py.Group, values: dict[str, Any]) -> None:
    """Text as a fixed-length string, a whole number as int64, anything else as JSON text."""
    for key, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            group.attrs.create(key, np.int64(value))
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            group.attrs.create(key, np.bytes_(text.encode("ascii")))


def read_attributes(group: h5py.Group, where: str) -> dict[str, Any]:
    """Undo `write_attributes`."""
    values: dict[str, Any] = {}
    for key in group.attrs:
        try:
            value = attribute(group.attrs, key)
            is_json = isinstance(value, str) and value[:1] in ("{", "[")
            values[key] = json.loads(value) if is_json else value
        except Exception as error:  # h5py raises many kinds for types it does not know
            raise StoreError(f"{where}: attribute {key} cannot be read ({error})") from error
    return values


class Hdf5Sink:
    """Writes groups and arrays into a new file, under a prefix."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._prefix, self._new = prefix, NewFile(path)
        self.file = create_file(self._new)

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        target = create_group(self.file, f"{self._prefix}/{group}".strip("/"))
        write_attributes(target, values)

    def array(self, name: str, spec: ArraySpec, values: Array) -> str | None:
        parent, _, leaf = f"{self._prefix}/{name}".strip("/").rpartition("/")
        group = create_group(self.file, parent)
        settings: dict[str, Any] = {"track_times": False}
        if all(spec.shape):
            settings["chunks"] = (spec.rows(TOKEN_ROWS, CHUNK_BYTES), *spec.shape[1:])
            settings["fletcher32"] = True
            if spec.packing != "plain":
                settings |= hdf5plugin.Blosc(
                    cname="lz4" if spec.packing == "lz4" else "zstd",
                    clevel=1,
                    shuffle=hdf5plugin.Blosc.BITSHUFFLE
                    if spec.packing == "lz4"
                    else hdf5plugin.Blosc.NOSHUFFLE,
                )
        data = np.ascontiguousarray(values, spec.dtype)
        group.create_dataset(leaf, shape=spec.shape, dtype=spec.dtype, data=data, **settings)
        self.check()
        return None

    def check(self) -> None:
        """OSError if anything could not be written."""
        self._new.check()

    def close(self) -> None:
        self.file.close()
        self._new.finish()


class Hdf5Slices:
    """Rows of an HDF5 dataset."""

    def __init__(self, source: Hdf5Source, name: str) -> None:
        self._source, self._name = source, name
        self._begun: set[int] = set()  # chunks that the disk was told of
        self._open()
        self.shape, self.dtype = tuple(self._dataset.shape), self._dataset.dtype

    def _open(self) -> None:
        self._dataset = self._source.dataset(self._name)
        self._file: str = self._dataset.file.filename
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
                    f"decoded ({error}); run `feature-store verify`"
                ) from error

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


class Hdf5Source:
    """Reads an HDF5 store. Parts of an unfinished store lie beside it, in `<path>.parts/`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.generation: tuple[int, int] = (os.getpid(), 0)
        self.guard = threading.RLock()
        self._files: dict[Path, h5py.File] = {}

    def current(self) -> tuple[int, int]:
        """(process, times closed): an HDF5 handle must never be used after a fork."""
        if self.generation[0] != os.getpid():
            self._files, self.guard = {}, threading.RLock()
            self.generation = (os.getpid(), self.generation[1])
        return self.generation

    def _file(self, name: str) -> h5py.File:
        self.current()
        path = Path(self.path)
        segments = name.split("/")
        if segments[0] == "parts" and len(segments) > 1:
            part = Path(f"{self.path}.parts") / f"{segments[1]}.h5"
            path = part if part.is_file() else path
        if path not in self._files:
            try:
                self._files[path] = h5py.File(path, "r")
            except OSError as error:
                raise StoreError(f"{path}: not a readable HDF5 file ({error})") from error
        return self._files[path]

    def _object(self, name: str, kind: type) -> Any:
        with self.guard:
            try:
                check_links(self._file(name), name, self.path)
                found = self._file(name)[name or "/"]
                if isinstance(found, h5py.Dataset):
                    check_dataset(found, f"{self.path}: array {name}")
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
            return read_attributes(self._object(group, h5py.Group), f"{self.path}: {group}")
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{self.path}: attributes of '{group}/': {error}") from error

    def members(self, group: str) -> list[str]:
        folder = Path(f"{self.path}.parts")
        if group == "parts" and folder.is_dir():
            return sorted(file.stem for file in folder.glob("*.h5") if file.stem.isdecimal())
        try:
            return sorted(self._object(group, h5py.Group))
        except StoreError:
            return []

    def array(self, name: str) -> Slices:
        return Hdf5Slices(self, name)

    def fingerprint(self, name: str) -> str | None:
        return None

    def damage(self, arrays: Collection[str]) -> list[str]:
        found: set[str] = set()

        def visit(name: str, thing: object) -> None:
            if isinstance(thing, h5py.Dataset):
                found.add(name)

        try:
            self._file("").visititems(visit)
        except (OSError, RuntimeError) as error:
            return [f"the tree of groups cannot be read ({error})"]
        expected = set(arrays)
        problems = [f"missing array {name}" for name in sorted(expected - found)]
        problems += [f"extra array {name}" for name in sorted(found - expected)]
        path = Path(self.path)
        end = path.stat().st_size - DIGEST_BYTES
        with path.open("rb") as file:
            file.seek(end)
            if file.read() != file_digest(path, end):
                problems.append(FILE_ALTERED)
        return problems

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
