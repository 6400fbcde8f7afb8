"""The order of a stream: pure functions of its blocks, their lengths, seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.read.part_index import PartIndex
from teachonce.support.arrays import Array, permutation

KINDS = ("hidden", "logits", "attention", "task", "embedding")
PARTS_TOGETHER = 8
BATCHES_OF_POOL = 8  # batches, where these are counted in texts


class StreamArguments(TypedDict, total=False):
    """Arguments of `FeatureStore.stream` that are given by name, and have defaults there."""

    view: int
    shuffle: bool
    pool_blocks: int
    batch_texts: int | None
    skip: int
    every: int


@dataclass(frozen=True)
class StreamOrder:
    """What a stream gives, and in which order; see `FeatureStore.stream`.

    blocks int64 [n, 2] are rows of `PartIndex.blocks`, in any order; `features` are some of KINDS.
    `batch_texts`, if given, bounds a batch in place of `batch_tokens`. A pool then has blocks for
    `BATCHES_OF_POOL` such batches: only its last may be smaller. `skip` batches are passed over;
    of the others the first of every `every` is given.
    Raises StoreError for a number or a name that is not allowed.
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
        if not set(self.features) <= set(KINDS):
            kinds = ", ".join(KINDS)
            raise StoreError(f"stream: features must be of {kinds}, got {self.features!r}")
        if (
            min(self.batch_tokens, self.pool_blocks, self.batch_texts or 1, self.every) < 1
            or min(self.skip, self.seed, self.epoch) < 0
        ):
            raise StoreError(
                "stream: batch_tokens, batch_texts, pool_blocks and every must be over 0; skip,"
                " seed and epoch at least 0"
            )

    def pools(self, index: PartIndex) -> Iterator[tuple[Array, list[Array]]]:
        """Yield for each pool its blocks, and its batches as positions among their sequences."""
        rows = self.blocks
        if self.shuffle:
            rows = rows[order_blocks(index.part_of(rows[:, 0]), self.seed, self.epoch)]
        size = max(self.pool_blocks, BATCHES_OF_POOL * (self.batch_texts or 0))
        for number, first in enumerate(range(0, len(rows), size)):
            taken = rows[first : first + size]
            lengths = np.concatenate([index.lengths(int(b), int(e)) for b, e in taken])
            if self.shuffle:
                key = self.seed, self.epoch, number
                yield taken, shuffled_batches(lengths, self.batch_tokens, *key, self.batch_texts)
            else:
                yield taken, plain_batches(lengths, self.batch_tokens, self.batch_texts)

    def given(self, index: PartIndex) -> Iterator[tuple[Array, list[Array]]]:
        """Yield those of `pools` of which a batch is given, each with these batches alone."""
        first = self.skip
        for taken, batches in self.pools(index):
            if first < len(batches):
                yield taken, batches[first :: self.every]
                first += -(-(len(batches) - first) // self.every) * self.every
            first -= len(batches)

    def batch_count(self, index: PartIndex) -> int:
        """Count the batches of all pools, those included that are not given."""
        return sum(len(batches) for _, batches in self.pools(index))


def order_blocks(parts: Array, seed: int, epoch: int) -> Array:
    """Order of blocks [n] given each block's part: a few random parts at a time, then mixed.

    CachePolicy `PARTS_TOGETHER` parts together lets a reader hold few parts open.
    """
    numbers, place = np.unique(parts, return_inverse=True)
    rank = np.empty(len(numbers), np.int64)
    rank[permutation(len(numbers), seed, epoch, 0)] = np.arange(len(numbers))
    within = np.empty(len(parts), np.int64)
    within[permutation(len(parts), seed, epoch, 1)] = np.arange(len(parts))
    return np.lexsort((within, rank[place] // PARTS_TOGETHER))


def shuffled_batches(
    lengths: Array,
    batch_tokens: int,
    seed: int,
    epoch: int,
    pool: int,
    batch_texts: int | None = None,
) -> list[Array]:
    """Batches (positions in the pool) of similar length with B * max length <= batch_tokens, or of
    `batch_texts`."""
    mixed = permutation(len(lengths), seed, epoch, 2, pool)
    ordered = mixed[np.argsort(-lengths[mixed], kind="stable")]
    batches = _fill(ordered, lengths, batch_tokens, batch_texts)
    return [batches[number] for number in permutation(len(batches), seed, epoch, 3, pool)]


def plain_batches(lengths: Array, batch_tokens: int, batch_texts: int | None = None) -> list[Array]:
    """Batches in the given order with B * max length <= batch_tokens, or of `batch_texts`."""
    return _fill(np.arange(len(lengths)), lengths, batch_tokens, batch_texts)


def _fill(
    ordered: Array, lengths: Array, batch_tokens: int, batch_texts: int | None
) -> list[Array]:
    if batch_texts is not None:
        return np.split(ordered, range(batch_texts, len(ordered), batch_texts))
    edges, longest, begin = [0], 0, 0
    for place, length in enumerate(lengths[ordered].tolist()):
        longest = max(longest, length)
        if place > begin and longest * (place - begin + 1) > batch_tokens:
            edges.append(place)
            begin, longest = place, length
    edges.append(len(ordered))
    return [ordered[left:right] for left, right in zip(edges[:-1], edges[1:], strict=True)]
