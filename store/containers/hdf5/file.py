"""Write HDF5 files, chunked, with hdf5plugin's Blosc and Fletcher-32. A full disk is an error, not
a crash."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import io
import json
import os
import weakref
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from teachonce.store.format.layout import ArraySpec, groups_above, teacher_array
from teachonce.support import files
from teachonce.support.arrays import Array

# Filtered chunks of about this size are read fastest: HDF5's own cache holds 1 MiB of chunks.
TOKEN_ROWS = 1024
CHUNK_BYTES = 2**18
DIGEST_BYTES = 32


def parts_folder(path: str | Path) -> Path:
    """Return the folder with the parts of an unfinished store. If `path` is a link, the folder is
    next to the file that it leads to."""
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    return target.with_name(f"{target.name}.parts")


def _created(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)  # not through a link


class NewFile(io.FileIO):
    """Serves HDF5 as a file object whose writes never fail: HDF5 crashes after a failed write.

    The first error is stored for `check`, and all later writes are dropped.
    """

    # HDF5 cannot abandon a file: after a failed write it tries again whenever something is closed,
    # until it crashes.

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        super().__init__(path, "w+", opener=_created)
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.name))

    def give_up(self) -> None:
        """Drop all writes from now on."""
        self._error = self._error or OSError(errno.ECANCELED, "given up")

    def finish(self) -> None:
        """Sync the file to the disk and close it. Raises the first error of a write."""
        self.check()
        os.fsync(self.fileno())
        self.close()

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest and self._error is None:
            try:
                rest = rest[super().write(rest) :]  # writes fewer bytes if the disk is full
            except OSError as error:
                self._error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0


def create_file(file: NewFile) -> h5py.File:
    """Open a new file in HDF5, with checksums of its metadata and without timestamps."""
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    # Timestamps would give equal stores different bytes.
    created.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    # In earlier versions, checksums do not cover all metadata.
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
    # The driver writes into `file`, but HDF5 requires some name.
    return h5py.File(h5py.h5f.create(b"new", h5py.h5f.ACC_TRUNC, created, access))


def create_group(file: h5py.File, name: str) -> h5py.Group:
    """Return a group by its name; create it and its parents if they are missing."""
    settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    settings.set_obj_track_times(False)
    for path in (*groups_above(name), name):
        if path and path not in file:
            h5py.h5g.create(file.id, path.encode(), gcpl=settings)
    return file[name or "/"]


def write_attributes(group: h5py.Group, values: dict[str, Any]) -> None:
    """Write attributes: text as a fixed-length string, a whole number as int64, all else as JSON
    text."""
    for key, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            group.attrs.create(key, np.int64(value))
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            # h5py stores str as variable-length text, which FORMAT.md forbids.
            group.attrs.create(key, np.bytes_(text.encode("ascii")))


class Hdf5Sink:
    """Writes groups and arrays into a new file, under a prefix. As a context manager it closes the
    file, or abandons it after an error."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._prefix, self._new = prefix, NewFile(path)
        self.file = create_file(self._new)
        _SINKS.add(self)

    def __enter__(self) -> Hdf5Sink:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        target = create_group(self.file, f"{self._prefix}/{group}".strip("/"))
        write_attributes(target, values)

    def array(self, name: str, values: Array, spec: ArraySpec | None = None) -> str | None:
        spec = spec or teacher_array(values)
        parent, _, leaf = f"{self._prefix}/{name}".strip("/").rpartition("/")
        group = create_group(self.file, parent)
        settings: dict[str, Any] = {"track_times": False}
        # HDF5 refuses chunks of length 0.
        if all(spec.shape):
            settings["chunks"] = (spec.rows(TOKEN_ROWS, CHUNK_BYTES), *spec.shape[1:])
            settings["fletcher32"] = True
            if spec.packing:
                cname, clevel, shuffle = spec.packing
                kind = getattr(hdf5plugin.Blosc, shuffle.upper())
                settings |= hdf5plugin.Blosc(cname, clevel, kind)
        data = np.ascontiguousarray(values, spec.dtype)
        group.create_dataset(leaf, shape=spec.shape, dtype=spec.dtype, data=data, **settings)
        # `NewFile` hides failed writes from HDF5, so they are raised here, after each array.
        self.check()
        return None

    def check(self) -> None:
        """Raise OSError if anything could not be written."""
        self._new.check()

    def close(self) -> None:
        self.file.close()
        self._new.finish()

    def abandon(self) -> None:
        """Close the file as it is, without another write to the disk."""
        self._new.give_up()
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self.file.close()
            self._new.close()


_SINKS: weakref.WeakSet[Hdf5Sink] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    """Close the files that an error left open, before Python exits. Otherwise HDF5 closes them
    later itself, calls the methods of `NewFile` and crashes."""
    for sink in list(_SINKS):
        sink.abandon()


def file_digest(path: Path, size: int) -> bytes:
    """Return the SHA-256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, 2**24))):
            digest.update(data)
            size -= len(data)
    return digest.digest()


def append_digest(path: Path) -> None:
    """Append the SHA-256 of a finished file to it.

    HDF5 ignores bytes after its end. HDF5's own checksums do not cover the gaps between objects.
    """
    files.append(path, file_digest(path, path.stat().st_size))
    files.sync(path)
