"""Arrays that are read from the disk once: what was decoded stays in memory."""

from __future__ import annotations

import numpy as np

from store.tree import Array, Slices


class KeptSlices:
    """Rows of an array that are kept from their first use on. See `store.tree.Slices`."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.shape, self.dtype = slices.shape, slices.dtype
        self._rows = np.empty(self.shape, self.dtype)  # takes memory where it is written
        self._there = np.zeros(self.shape[0], bool)

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
        if not self._there[begin:end].all():
            self._slices.prefetch(begin, end)

    def _keep(self, begin: int, end: int) -> None:
        # Two threads may read the same rows: they write the same bytes, and say so afterwards.
        if not self._there[begin:end].all():
            self._slices.read_into(begin, end, self._rows[begin:end])
            self._there[begin:end] = True
