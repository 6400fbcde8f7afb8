"""Locate the sequences of a store: their parts, lengths and blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from threading import Lock

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.interface import StoreSource
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.layout import ArraySpec, as_read, part_arrays
from teachonce.store.format.manifest import Manifest
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.store.read.part import PartReader
from teachonce.support.arrays import Array, begins, ranges

# Twice the parts that a stream mixes at a time (`stream_order.PARTS_TOGETHER`).
OPEN_PARTS = 16
PARTS_AT_ONCE = 1024  # whose lengths are in memory while blocks are computed


class PartIndex:
    """Lists the parts of a store in order; sequences are numbered across all parts.

    first: int64 [parts + 1], the first sequence of each part, then the number of all sequences.
    The last OPEN_PARTS parts that were read remain open.
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
        self._opening = Lock()  # a thread reads ahead for training while another one validates
        self.set_cache(None)

    def __len__(self) -> int:
        return int(self.first[-1])

    def part(self, index: int) -> PartReader:
        """Open the part at `index` in the manifest; its number may differ from the index."""
        with self._opening:
            part = self._parts.pop(index, None)
            if part is None:
                begin, end = self.first[index : index + 2]
                lengths = None if self._known is None else self._known[begin:end]
                entry = self._entries[index]
                part = PartReader(
                    self._source, entry, self.features, lengths, self._cached, self._watch
                )
            self._parts[index] = part
            if len(self._parts) > self._open_parts:
                self._parts.popitem(last=False)
            return part

    def set_cache(self, cached: Callable[[str], bool] | None) -> None:
        """Choose the arrays to cache at their first use; None, the initial state, caches no
        array."""
        with self._opening:
            self._cached = cached
            # Closing a part would free its cached arrays, so all parts stay open.
            self._open_parts = len(self._entries) if cached else OPEN_PARTS
            self._parts.clear()

    def close(self) -> None:
        """Close the open parts; a later read opens them again."""
        self._parts.clear()

    def specs(self) -> dict[str, ArraySpec]:
        """Return the spec of each array of the first part; the keys are the names for
        `PartReader.array`. All parts have the same names, dtypes and row shapes."""
        return as_read(part_arrays(self.features, self._entries[0].counts))

    def part_of(self, index: ArrayLike) -> Array:
        """Return the index of the part of each sequence in `index`."""
        return np.asarray(np.searchsorted(self.first, index, "right") - 1)

    def locate(self, index: int) -> tuple[PartReader, int]:
        """Return the part of sequence `index`, and its position in the part."""
        part_index = int(self.part_of(index))
        return self.part(part_index), index - int(self.first[part_index])

    def lengths(self, begin: int, end: int) -> Array:
        """Return int64 [end - begin]: the numbers of tokens of sequences begin..end of one part."""
        if self._known is not None:
            return np.asarray(self._known[begin:end], np.int64)
        part_index = int(self.part_of(begin))
        if part_index not in self._lengths:
            # Only for a store whose manifest has no lengths. The next epoch would have to open the
            # part again to plan its batches.
            self._lengths[part_index] = np.diff(self.part(part_index).token_start).astype(np.int32)
        first = int(self.first[part_index])
        return self._lengths[part_index][begin - first : end - first].astype(np.int64)

    def lengths_of(self, blocks: Array) -> Array:
        """Return int64 [n]: tokens of the sequences of blocks, one block after another."""
        if self._known is None:
            return np.concatenate([self.lengths(begin, end) for begin, end in blocks.tolist()])
        rows = ranges(blocks[:, 0], blocks[:, 1] - blocks[:, 0])
        return np.asarray(self._known[rows], np.int64)

    def lengths_of_parts(self, low: int, high: int) -> Array:
        """Return int64: the numbers of tokens of all sequences of parts low..high."""
        edges = self.first[low : high + 1].tolist()
        if self._known is not None:
            return np.asarray(self._known[edges[0] : edges[-1]], np.int64)
        of_parts = [self.lengths(begin, end) for begin, end in pairwise(edges)]
        return np.concatenate([np.empty(0, np.int64), *of_parts])

    def blocks(self, block_tokens: int) -> Array:
        """Return int64 [n, 2], a row (begin, end) for each block: consecutive sequences with about
        `block_tokens` tokens in all.

        No block crosses a part. Raises StoreError for `block_tokens` below 1.
        """
        if block_tokens < 1:
            raise StoreError("blocks: block_tokens must be over 0")
        starts = [np.empty(0, np.int64)]
        for low in range(0, len(self._entries), PARTS_AT_ONCE):  # all lengths would be large
            high = min(low + PARTS_AT_ONCE, len(self._entries))
            lengths, base = self.lengths_of_parts(low, high), self.first[low]
            starts.append(base + block_starts(lengths, self.first[low:high] - base, block_tokens))
        rows = np.concatenate(starts)
        return np.stack([rows, np.append(rows, len(self))[1:]], axis=1)

    def check_blocks(self, blocks: ArrayLike) -> Array:
        """Return a caller's blocks as int64 [n, 2]; `[]` for none. Raises StoreError for other
        shapes and for fractions, and if a block is empty or crosses a part."""
        given = np.asarray(blocks)
        if given.size and (given.ndim != 2 or given.shape[1] != 2 or given.dtype.kind not in "iu"):
            raise StoreError(
                f"blocks must be whole numbers [n, 2], got {given.dtype}{list(given.shape)}"
            )
        rows = given.astype(np.int64).reshape(-1, 2)
        begin, end = rows.T
        valid = (begin >= 0) & (begin < end) & (end <= len(self))
        # `Pool` finds the part of a block by its first sequence alone.
        if not valid.all() or (self.part_of(begin) != self.part_of(end - 1)).any():
            raise StoreError(
                f"{self.path}: blocks must be runs begin..end inside a part, as blocks() returns"
            )
        return rows


def block_starts(lengths: Array, parts: Array, block_tokens: int) -> Array:
    """Return int64 [n]: the first sequence of each block of about `block_tokens` tokens.

    parts: [p], the first sequences of the parts; no block crosses a part.
    """
    token_begin = begins(lengths)
    sizes = np.diff(parts, append=len(lengths))
    # Tokens are counted from the start of each part: a part has the same blocks whatever parts come
    # before it, so `blocks` can compute some parts at a time.
    numbers = (token_begin - np.repeat(token_begin[parts], sizes)) // block_tokens
    new = np.diff(numbers, prepend=-1) != 0
    new[parts] = True
    return np.flatnonzero(new)
