"""Arrays of parts that are cached from their first use on: in the memory of this process, or in
files that processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

from teachonce.store.containers.cache_word import SHARED
from teachonce.store.containers.interface import Slices
from teachonce.store.containers.memory_map import FileMap
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

BLOCK = 4096  # rows of a kept array with one flag: one for each would double what a map takes
FORM = "rows-1"  # the folder of files of this form: rows, then a flag for each BLOCK of them

Shape = tuple[int, ...]


class Room(Protocol):
    """Where the rows of an array are kept, and a flag for each BLOCK of them that is there."""

    rows: Array
    there: Array

    def filling(self) -> AbstractContextManager[object]:
        """Hold the lock of who writes rows."""


class Own:
    """Room in the memory of this process."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty(shape, dtype)  # takes memory where it is written
        self.there = np.zeros(_blocks_in(shape), bool)
        self._lock = Lock()

    def filling(self) -> AbstractContextManager[object]:
        return self._lock


class Shared:
    """Room in a file that each process maps which names the folder. What a killed process left half
    written has no flag, and its lock is gone with it."""

    def __init__(self, path: Path, shape: Shape, dtype: np.dtype[Any]) -> None:
        """Reserve the room. Raises OSError."""
        self._path = path
        size = bytes_of(shape, dtype)
        with _locked(path) as file:
            if os.fstat(file).st_size != size:
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError:
                    os.ftruncate(file, 0)
                    raise
        data = FileMap(path, shared=True).data
        flags = _blocks_in(shape)
        self.rows = data[: size - flags].view(dtype).reshape(shape)
        self.there = data[size - flags :].view(bool)

    def filling(self) -> AbstractContextManager[object]:
        return _locked(self._path)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file against other processes and threads. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if files.lock(file, wait=True) is None:
            raise OSError(f"{path.parent}: its file system has no locks; choose a local disk")
        yield file
    finally:
        os.close(file)


@dataclass(frozen=True)
class Keeping:
    """Which arrays of parts stay in memory, by their paths there, and the folder of the files that
    hold them, for all processes that name it; None: in the memory of this process alone."""

    keeps: Callable[[str], bool]
    folder: Path | None = None

    def of(self, slices: Slices, name: str, sha256: str) -> Slices:
        """Return an array that stays in memory, if it is one of these. Raises UserError where the
        folder has no room for it, or cannot be written."""
        if not self.keeps(name):
            return slices
        if self.folder is None or not slices.shape[0]:
            return KeptSlices(slices, Own(slices.shape, slices.dtype))
        path = shared_file(self.folder, sha256, slices.shape, slices.dtype)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return KeptSlices(slices, Shared(path, slices.shape, slices.dtype))
        except OSError as error:
            raise UserError(
                f"--cache {SHARED}{self.folder}: no room can be taken there:"
                f" {files.reason(error)}; give a folder of another disk, or --cache none"
            ) from error


def shared_file(folder: Path, sha256: str, shape: Shape, dtype: np.dtype[Any]) -> Path:
    """Name the file of an array by what it holds: stores and their copies share what is equal."""
    return folder / FORM / f"{sha256}.{dtype.name}.{'x'.join(map(str, shape))}"


def bytes_of(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Count the bytes of an array's file."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + _blocks_in(shape)


class KeptSlices:
    """Slices of an array whose rows stay in a room from their first use on."""

    def __init__(self, slices: Slices, room: Room) -> None:
        self._slices, self._room = slices, room
        self.shape, self.dtype = slices.shape, slices.dtype

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        self._keep(begin, end)
        rows = self._room.rows[begin:end]
        rows.flags.writeable = False
        return rows

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._keep(begin, end)
        out[...] = self._room.rows[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        if not self._room.there[_blocks(begin, end)].all():
            self._slices.prefetch(begin, end)

    def _keep(self, begin: int, end: int) -> None:
        room, blocks = self._room, _blocks(begin, end)
        if room.there[blocks].all():
            return
        # Never a block twice: another reader may hold a view of it, and a decoder writes into it.
        with room.filling():
            edges = np.flatnonzero(np.diff(room.there[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, room.rows[low:high])
                room.there[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """The blocks that hold rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))


def _blocks_in(shape: Shape) -> int:
    return -(-shape[0] // BLOCK)
