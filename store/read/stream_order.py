"""The order of a stream: a pure function of its blocks, their lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral
from typing import TypedDict

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.read.part_index import PartIndex
from teachonce.support.arrays import Array, permutation, starts

KINDS = ("hidden", "logits", "attention", "task", "embedding")
PARTS_TOGETHER = 8  # parts that are shuffled together
BATCHES_OF_POOL = 8  # batches of a pool, if their size is a number of texts
POOLS_AT_ONCE = 16  # whose lengths are read together


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple; a single name may be given as a string."""
    return (names,) if isinstance(names, str) else tuple(names)


class StreamArguments(TypedDict, total=False):
    """Types the keyword arguments that `FeatureStore.stream` passes to `StreamOrder`."""

    view: int
    shuffle: bool
    pool_blocks: int
    batch_texts: int | None
    skip: int
    every: int


@dataclass(frozen=True)
class StreamOrder:
    """Chooses what a stream yields, and in which order; see `FeatureStore.stream`.

    blocks: int64 [n, 2], rows of `PartIndex.blocks`, in any order.
    features: some of KINDS.
    batch_texts: the size of a batch in texts, in place of `batch_tokens`. A pool then has blocks
        for at least `BATCHES_OF_POOL` batches, so only its last batch may be smaller.
    skip, every: skip the first `skip` batches, then yield every `every`-th.

    Raises StoreError for numbers out of range.
    """

    seed: int
    epoch: int
    batch_tokens: int
    blocks: Array = field(compare=False)
    pool_blocks: int = 64
    shuffle: bool = True
    skip: int = 0
    view: int = 0
    features: tuple[str, ...] = KINDS
    batch_texts: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        texts = 1 if self.batch_texts is None else self.batch_texts
        sizes = self.batch_tokens, self.pool_blocks, texts, self.every
        places = self.skip, self.seed, self.epoch
        whole = all(isinstance(number, Integral) for number in (*sizes, *places))
        if not whole or min(sizes) < 1 or min(places) < 0:
            raise StoreError(
                "stream: batch_tokens, batch_texts, pool_blocks and every must be whole numbers"
                " over 0; skip, seed and epoch whole numbers from 0"
            )

    def _pools(self, index: PartIndex) -> Iterator[tuple[Array, Array]]:
        """Yield the blocks of each pool, and the lengths of their sequences."""
        rows = self.blocks
        if self.shuffle:
            # Blocks, not sequences: of compressed arrays 10,000 to 50,000 tokens a second can be
            # read one sequence at a time.
            rows = rows[order_blocks(index.part_of(rows[:, 0]), self.seed, self.epoch)]
        # A block has at least one text, so this many blocks suffice for BATCHES_OF_POOL batches.
        size = max(self.pool_blocks, BATCHES_OF_POOL * (self.batch_texts or 0))
        first = 0
        while first < len(rows):
            # Reading lengths block by block took most of the 8.7 s of a plan of a million parts.
            # The first batch waits only for the lengths of its own pool.
            pools = min(max(1, first // size), POOLS_AT_ONCE)
            chunk = rows[first : first + pools * size]
            lengths, start = index.lengths_of(chunk), starts(chunk[:, 1] - chunk[:, 0])
            for begin in range(0, len(chunk), size):
                blocks = chunk[begin : begin + size]
                yield blocks, lengths[start[begin] : start[begin + len(blocks)]]
            first += len(chunk)

    def _batches(self, lengths: Array, pool: int) -> list[Array]:
        """Return the batches of a pool as positions among its sequences."""
        if self.shuffle:
            # The key has the number of the pool, so a resumed training skips pools without drawing
            # for them.
            key = self.seed, self.epoch, pool
            return shuffled_batches(lengths, self.batch_tokens, *key, self.batch_texts)
        return plain_batches(lengths, self.batch_tokens, self.batch_texts)

    def _count(self, lengths: Array) -> int:
        """Count the batches of a pool, which do not depend on how it is shuffled."""
        ordered = -np.sort(-lengths) if self.shuffle else lengths
        return len(_edges(ordered, self.batch_tokens, self.batch_texts, self.shuffle)) - 1

    def chosen_pools(self, index: PartIndex) -> Iterator[tuple[Array, list[Array]]]:
        """Yield, for each pool, its blocks and the batches that `skip` and `every` choose from it.

        A batch holds positions among the sequences of the blocks. Pools without a chosen batch are
        left out.
        """
        first = self.skip
        for number, (blocks, lengths) in enumerate(self._pools(index)):
            count = self._count(lengths)
            if first < count:
                yield blocks, self._batches(lengths, number)[first :: self.every]
                first += -(-(count - first) // self.every) * self.every
            first -= count

    def batch_count(self, index: PartIndex) -> int:
        """Count the batches of all pools, including those that `skip` and `every` leave out."""
        return sum(self._count(lengths) for _, lengths in self._pools(index))


def order_blocks(parts: Array, seed: int, epoch: int) -> Array:
    """Return a random order of blocks [n]; `parts` [n] are the blocks' parts.

    Parts are drawn in groups of PARTS_TOGETHER, and the blocks of a group are shuffled.
    """
    # With few parts at a time, a reader needs to have few parts open.
    numbers, inverse = np.unique(parts, return_inverse=True)
    rank = np.empty(len(numbers), np.int64)
    # The last number of a key, 0 to 3, makes the draws of an epoch independent of one another.
    rank[permutation(len(numbers), seed, epoch, 0)] = np.arange(len(numbers))
    within = np.empty(len(parts), np.int64)
    within[permutation(len(parts), seed, epoch, 1)] = np.arange(len(parts))
    # One number (group, then place in the group) sorts in an eighth of the time of two keys.
    return np.argsort(rank[inverse] // PARTS_TOGETHER * len(parts) + within)


def shuffled_batches(
    lengths: Array,
    batch_tokens: int,
    seed: int,
    epoch: int,
    pool: int,
    batch_texts: int | None = None,
) -> list[Array]:
    """Return batches (positions in the pool) of sequences of similar length, in random order.

    B * max length <= batch_tokens, or B = `batch_texts` if given.
    """
    mixed = permutation(len(lengths), seed, epoch, 2, pool)
    # Shuffled before a stable sort: sequences of the same length have other neighbours in each
    # epoch.
    ordered = mixed[np.argsort(-lengths[mixed], kind="stable")]
    batches = _cut(ordered, _edges(lengths[ordered], batch_tokens, batch_texts, descending=True))
    return [batches[number] for number in permutation(len(batches), seed, epoch, 3, pool)]


def plain_batches(lengths: Array, batch_tokens: int, batch_texts: int | None = None) -> list[Array]:
    """Return batches in the given order; sizes as for `shuffled_batches`."""
    return _cut(np.arange(len(lengths)), _edges(lengths, batch_tokens, batch_texts))


def _cut(ordered: Array, edges: Sequence[int]) -> list[Array]:
    return [ordered[left:right] for left, right in pairwise(edges)]


def _edges(
    lengths: Array, batch_tokens: int, batch_texts: int | None, descending: bool = False
) -> Sequence[int]:
    """Return the position of the first sequence of each batch, then the number of sequences. If
    `descending`, the lengths descend."""
    count = len(lengths)
    if batch_texts is not None:
        return [*range(0, count, batch_texts), count]
    edges, longest = [0], 0
    if descending:  # a step for each batch, not for each sequence
        while (begin := edges[-1]) < count:
            # A forged store may have sequences of 0 tokens, by which nothing can be divided.
            longest = int(lengths[begin])
            edges.append(min(count, begin + max(1, batch_tokens // longest if longest else count)))
        return edges
    for number, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if number > edges[-1] and longest * (number - edges[-1] + 1) > batch_tokens:
            edges.append(number)
            longest = length
    return [*edges, count]
