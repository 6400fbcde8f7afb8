"""Cache the arrays of parts in memory from their first use on."""

from __future__ import annotations

from threading import Lock

import numpy as np

from teachonce.store.containers.interface import Slices
from teachonce.support.arrays import Array

BLOCK = 4096  # rows with one flag: a flag for each row would double the memory of a uint8 map


class CachedSlices:
    """Reads slices of an array once and then serves them from memory, with a flag for each BLOCK
    of rows that has been read."""

    def __init__(self, slices: Slices) -> None:
        self._slices, self.shape, self.dtype = slices, slices.shape, slices.dtype
        self._rows = np.empty(self.shape, self.dtype)  # takes memory only when rows are written
        self._cached = np.zeros(-(-self.shape[0] // BLOCK), bool)
        self._filling = Lock()

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        self._fill(begin, end)
        rows = self._rows[begin:end]
        # A view of the cache: a change in place would stay for all later epochs.
        rows.flags.writeable = False
        return rows

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._fill(begin, end)
        out[...] = self._rows[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        if not self._cached[_blocks(begin, end)].all():
            self._slices.prefetch(begin, end)

    def _fill(self, begin: int, end: int) -> None:
        blocks = _blocks(begin, end)
        # Read without the lock: a flag is set after its rows are there, and never unset.
        if self._cached[blocks].all():
            return
        # A block is never written twice: another reader may hold a view of it.
        with self._filling:
            edges = np.flatnonzero(np.diff(self._cached[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, self._rows[low:high])
                self._cached[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """Return the blocks that contain rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))
