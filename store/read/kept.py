"""Arrays that are read from the disk once: what was decoded stays in memory."""

from __future__ import annotations

from threading import Lock

import numpy as np

from store.containers.interface import Slices
from support.arrays import Array

BLOCK = 4096  # rows with one flag: one for each would double what a map takes


class KeptSlices:
    """Rows of an array that are kept from their first use on. See `store.tree.Slices`."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.shape, self.dtype = slices.shape, slices.dtype
        self._rows = np.empty(self.shape, self.dtype)  # takes memory where it is written
        self._there = np.zeros(-(-self.shape[0] // BLOCK), bool)  # of each block of rows
        self._reading = Lock()

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        self._keep(begin, end)
        rows = self._rows[begin:end]
        rows.flags.writeable = False
        return rows

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._keep(begin, end)
        out[...] = self._rows[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        if not self._there[_blocks(begin, end)].all():
            self._slices.prefetch(begin, end)

    def _keep(self, begin: int, end: int) -> None:
        blocks = _blocks(begin, end)
        if self._there[blocks].all():
            return
        # Never a block twice: another thread may hold a view of it, and a decoder writes into it.
        with self._reading:
            edges = np.flatnonzero(np.diff(self._there[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, self._rows[low:high])
                self._there[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """Those that hold rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))
