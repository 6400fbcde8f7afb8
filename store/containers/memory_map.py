"""Map files into memory for reading, and let the system read ahead."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_longlong]
    libc.mmap.restype = pointer
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def prefetch(path: str, begin: int, size: int) -> None:
    """Ask the system to read ahead some bytes of a file. Raises OSError."""
    if size <= 0 or not hasattr(os, "posix_fadvise"):
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(file)


class FileMap:
    """The bytes of a file, mapped read-only. Raises OSError.

    The file is closed at once, and the map is released with the last array that uses it. A forked
    process can continue reading it. The file must not be truncated meanwhile (SIGBUS); published
    parts never change.
    """

    # Not mmap.mmap: before Python 3.13 it holds a file descriptor for each map, and a process has
    # few of them.

    def __init__(self, path: Path) -> None:
        self.data: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._address: int = 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return
            address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address is None or address == FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
        self._address = address
        held = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit: a thread may still be reading then.
        weakref.finalize(held, _libc().munmap, address, size).atexit = False
        self.data = np.frombuffer(memoryview(held), np.uint8)
        self.data.flags.writeable = False

    def prefetch(self, begin: int, size: int) -> None:
        """Ask the system to read ahead some bytes."""
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if size:
            _libc().madvise(self._address + start, begin + size - start, mmap.MADV_WILLNEED)
