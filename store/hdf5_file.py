"""New HDF5 files on a disk that may be full."""

from __future__ import annotations

import io
import os
from pathlib import Path

import h5py


class NewFile(io.RawIOBase):
    """A file that HDF5 writes, which takes whatever is written.

    HDF5 cannot give a file up: what it failed to write it tries again whenever something is closed,
    until it crashes. So the first error is kept for `check`, and what follows it is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = io.FileIO(path, "w+")
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path))

    def finish(self) -> None:
        """Everything is on the disk when this returns."""
        self.check()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        self._file.close()
        super().close()

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        left = memoryview(data).cast("B")
        size = len(left)
        while left and self._error is None:
            try:
                left = left[self._file.write(left) :]  # less than asked where the disk is full
            except OSError as error:
                self._error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._file.readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Nothing is buffered."""


def create_file(file: NewFile) -> h5py.File:
    """The HDF5 side of a new file: checksummed metadata, no timestamps, so that equal stores are
    equal."""
    created = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    created.set_obj_track_times(False)
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
    return h5py.File(h5py.h5f.create(b"new", h5py.h5f.ACC_TRUNC, created, access))
