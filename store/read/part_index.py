"""Where the sequences of a store lie: in which part, how long they are, which blocks they form."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from threading import Lock

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.interface import StoreSource
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.layout import ArraySpec, part_arrays
from teachonce.store.format.manifest import Manifest
from teachonce.store.read.cached_arrays import CachePolicy
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.store.read.part import PartReader
from teachonce.support.arrays import Array, begins

OPEN_PARTS = 16
PARTS_AT_ONCE = 1024


class PartIndex:
    """The parts of a store in order; sequences are numbered through all of them.

    `first` int64 [parts + 1] are the first sequences of the parts and, at the end, the number of
    all. The parts that were read last stay open.
    """

    def __init__(
        self, source: StoreSource, features: Features, manifest: Manifest, watch: ChangeWatch
    ) -> None:
        self.path, self.features, self.remote = source.path, features, source.remote
        self.grain = source.grain
        self._source, self._entries, self._watch = source, manifest.parts, watch
        self.first = manifest.first
        self._known, self._lengths = manifest.lengths, dict[int, Array]()
        self._parts: OrderedDict[int, PartReader] = OrderedDict()
        self._opening = Lock()  # training reads ahead in a thread while it validates in another
        self.set_cache(None)

    def __len__(self) -> int:
        return int(self.first[-1])

    def part(self, place: int) -> PartReader:
        """The part at a place (not its number), opened; a few are kept open."""
        with self._opening:
            part = self._parts.pop(place, None)
            if part is None:
                begin, end = self.first[place : place + 2]
                known = None if self._known is None else self._known[begin:end]
                entry = self._entries[place]
                part = PartReader(
                    self._source, entry, self.features, known, self._cache_policy, self._watch
                )
            self._parts[place] = part
            if len(self._parts) > self._open_parts:
                self._parts.popitem(last=False)
            return part

    def set_cache(self, cache_policy: CachePolicy | None) -> None:
        """Choose what stays in memory from its first use on; None: nothing, as when the store is
        opened."""
        with self._opening:
            self._cache_policy = cache_policy
            self._open_parts = len(self._entries) if cache_policy else OPEN_PARTS
            self._parts.clear()

    def close(self) -> None:
        """Let go of the open parts; reading opens them again."""
        self._parts.clear()

    def specs(self) -> dict[str, ArraySpec]:
        """Specs of the arrays of the first part; all parts share their names, dtypes and row
        shapes."""
        return part_arrays(self.features, self._entries[0].counts)

    def part_of(self, index: ArrayLike) -> Array:
        """Places of the parts of sequences."""
        return np.asarray(np.searchsorted(self.first, index, "right") - 1)

    def locate(self, index: int) -> tuple[PartReader, int]:
        """The part of a sequence, and its position there."""
        place = int(self.part_of(index))
        return self.part(place), index - int(self.first[place])

    def lengths(self, begin: int, end: int) -> Array:
        """int64 [end - begin]: tokens of sequences begin..end of one part."""
        if self._known is not None:
            return np.asarray(self._known[begin:end], np.int64)
        place = int(self.part_of(begin))
        if place not in self._lengths:
            self._lengths[place] = np.diff(self.part(place).token_start).astype(np.int32)
        first = int(self.first[place])
        return self._lengths[place][begin - first : end - first].astype(np.int64)

    def all_lengths(self) -> Array:
        """int64 [n]: tokens of all sequences."""
        return self._lengths_of_parts(0, len(self._entries))

    def _lengths_of_parts(self, low: int, high: int) -> Array:
        """int64: tokens of the sequences of parts low..high."""
        edges = self.first[low : high + 1].tolist()
        if self._known is not None:
            return np.asarray(self._known[edges[0] : edges[-1]], np.int64)
        of_parts = [self.lengths(begin, end) for begin, end in pairwise(edges)]
        return np.concatenate([np.empty(0, np.int64), *of_parts])

    def blocks(self, block_tokens: int) -> Array:
        """int64 [n, 2]: runs begin..end of consecutive sequences of about `block_tokens` tokens; a
        block never crosses a part. Raises StoreError for a number below 1."""
        if block_tokens < 1:
            raise StoreError("blocks: block_tokens must be over 0")
        found = [np.empty(0, np.int64)]
        for low in range(0, len(self._entries), PARTS_AT_ONCE):  # lengths of all would be large
            high = min(low + PARTS_AT_ONCE, len(self._entries))
            lengths, base = self._lengths_of_parts(low, high), self.first[low]
            found.append(base + block_starts(lengths, self.first[low:high] - base, block_tokens))
        rows = np.concatenate(found)
        return np.stack([rows, np.append(rows[1:], len(self))], axis=1)

    def check_blocks(self, blocks: ArrayLike) -> Array:
        """Check blocks [n, 2] of a caller. Raises StoreError if one is empty or crosses a part."""
        rows = np.asarray(blocks, np.int64)
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise StoreError(f"blocks must be [n, 2], got {list(rows.shape)}")
        begin, end = rows[:, 0], rows[:, 1]
        good = (begin >= 0) & (begin < end) & (end <= len(self))
        if not good.all() or (self.part_of(begin) != self.part_of(end - 1)).any():
            raise StoreError(f"{self.path}: blocks must be rows of fs.blocks()")
        return rows


def block_starts(lengths: Array, parts: Array, block_tokens: int) -> Array:
    """int64 [n]: where runs of consecutive sequences of about `block_tokens` tokens each begin;
    parts [p] are the first sequences of parts, which no run crosses."""
    before = begins(lengths)
    sizes = np.diff(parts, append=len(lengths))
    numbers = (before - np.repeat(before[parts], sizes)) // block_tokens
    new = np.diff(numbers, prepend=-1) != 0
    new[parts] = True
    return np.flatnonzero(new)
