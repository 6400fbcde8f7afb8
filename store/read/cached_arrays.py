"""Arrays of parts that stay in memory from their first use on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from teachonce.store.containers.interface import Slices
from teachonce.support.arrays import Array

BLOCK = 4096  # rows of a cached array with one flag: a flag a row would double a map's memory

Shape = tuple[int, ...]


class RowCache:
    """Where the rows of an array are cached, and a flag for each BLOCK of them that is there."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty(shape, dtype)  # takes memory where it is written
        self.there = np.zeros(-(-shape[0] // BLOCK), bool)
        self.filling = Lock()


@dataclass(frozen=True)
class CachePolicy:
    """Which arrays of parts stay in memory, by their paths there."""

    keeps: Callable[[str], bool]

    def of(self, slices: Slices, name: str) -> Slices:
        """Return an array that stays in memory, if it is one of these."""
        if not self.keeps(name):
            return slices
        return CachedSlices(slices, RowCache(slices.shape, slices.dtype))


class CachedSlices:
    """Slices of an array whose rows stay in a room from their first use on."""

    def __init__(self, slices: Slices, room: RowCache) -> None:
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
        with room.filling:
            edges = np.flatnonzero(np.diff(room.there[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, room.rows[low:high])
                room.there[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """The blocks that hold rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))
