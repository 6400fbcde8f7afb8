"""Map files into memory for reading, and ask the operating system to read ahead."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
OPEN_FILES = 512
FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    # Without these types, ctypes passes and returns 32-bit integers, which truncate addresses.
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_longlong]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


class OpenFiles(Generic[T]):
    """Holds the most recently mapped files, at most `limit`: a store may have thousands of parts.

    There is no lock, because a forked process could inherit it locked. So two threads may map a
    file twice.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._limit = limit
        # Each operation on a dict with str keys is atomic. An OrderedDict with Path keys crashed:
        # comparing paths runs Python code, during which another thread changed its links.
        self._open: dict[str, T] = {}

    def get(self, path: str, opened: Callable[[str], T]) -> T:
        """Return the open file of a path. If it is not open, call `opened` to open it."""
        file = self._open.pop(path, None) or opened(path)
        self._open[path] = file
        for oldest in list(self._open)[: -self._limit]:
            self._open.pop(oldest, None)
        return file

    def clear(self) -> None:
        """Forget all files. A file still in use is released with its last reader."""
        self._open.clear()

    def __len__(self) -> int:
        return len(self._open)


class FileMap:
    """Maps the bytes of a file read-only. Raises OSError.

    The file is closed at once, and the map is released with the last array that uses it. A forked
    process can continue reading it. The file must not be truncated meanwhile (SIGBUS); published
    parts never change.
    """

    # Not mmap.mmap: before Python 3.13 it holds a file descriptor for each map, and a process has
    # few of them.

    def __init__(self, path: str) -> None:
        self.data: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._address: int = 0
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # mmap refuses a length of 0.
            if not size:
                return
            address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address is None or address == FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        self._address = address
        # Arrays over the map refer to `buffer` and may outlive this object, so the map is released
        # with `buffer`.
        buffer = (ctypes.c_ubyte * size).from_address(address)
        # The map is not released at exit, when a thread may still be reading.
        weakref.finalize(buffer, _libc().munmap, address, size).atexit = False
        self.data = np.frombuffer(memoryview(buffer), np.uint8)
        # A write to these pages would end the process with SIGSEGV instead of an exception.
        self.data.flags.writeable = False

    def prefetch(self, begin: int, size: int) -> None:
        """Ask the operating system to read ahead some bytes."""
        # madvise refuses an address that is not the start of a page.
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if size:
            _libc().madvise(self._address + start, begin + size - start, mmap.MADV_WILLNEED)
