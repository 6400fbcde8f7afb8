"""Cache the arrays of parts in memory from their first use on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from teachonce.store.containers.interface import Slices
from teachonce.support.arrays import Array

BLOCK = 4096  # rows with one flag: a flag for each row would double the memory of a uint8 map

Shape = tuple[int, ...]


class RowCache:
    """Memory for the rows of an array, with a flag for each BLOCK of rows that has been read."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.rows = np.empty(shape, dtype)  # takes memory only when rows are written
        self.cached = np.zeros(-(-shape[0] // BLOCK), bool)
        self.filling = Lock()


@dataclass(frozen=True)
class CachePolicy:
    """Chooses the arrays of parts to cache, by their paths in the part."""

    chosen: Callable[[str], bool]

    def of(self, slices: Slices, name: str) -> Slices:
        """Return `slices` with a cache if the array `name` is chosen, else `slices`."""
        if not self.chosen(name):
            return slices
        return CachedSlices(slices, RowCache(slices.shape, slices.dtype))


class CachedSlices:
    """Slices of an array that are read once and then served from memory."""

    def __init__(self, slices: Slices, cache: RowCache) -> None:
        self._slices, self._cache = slices, cache
        self.shape, self.dtype = slices.shape, slices.dtype

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        self._fill(begin, end)
        rows = self._cache.rows[begin:end]
        # A view of the cache: a change in place would stay for all later epochs.
        rows.flags.writeable = False
        return rows

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._fill(begin, end)
        out[...] = self._cache.rows[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        if not self._cache.cached[_blocks(begin, end)].all():
            self._slices.prefetch(begin, end)

    def _fill(self, begin: int, end: int) -> None:
        cache, blocks = self._cache, _blocks(begin, end)
        # Read without the lock: a flag is set after its rows are there, and never unset.
        if cache.cached[blocks].all():
            return
        # A block is never written twice: another reader may hold a view of it.
        with cache.filling:
            edges = np.flatnonzero(np.diff(cache.cached[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, cache.rows[low:high])
                cache.cached[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """Return the blocks that contain rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))
