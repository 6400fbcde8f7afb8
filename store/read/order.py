"""Order of blocks, pools and batches: pure functions of (blocks, lengths, seed, epoch).

Raw output of PCG64 is stable across numpy versions (its distributions are not), so that a seed
means the same order for ever.
"""

from __future__ import annotations

import numpy as np

from support.arrays import Array
from support.permutation import permutation

PARTS_TOGETHER = 8


def block_starts(lengths: Array, parts: Array, block_tokens: int) -> Array:
    """int64 [n]: where runs of consecutive sequences of about `block_tokens` tokens each begin;
    parts [p] are the first sequences of parts, which no run crosses."""
    before = np.cumsum(lengths) - lengths
    sizes = np.diff(parts, append=len(lengths))
    numbers = (before - np.repeat(before[parts], sizes)) // block_tokens
    begins = np.diff(numbers, prepend=-1) != 0
    begins[parts] = True
    return np.flatnonzero(begins)


def order_blocks(parts: Array, seed: int, epoch: int) -> Array:
    """Order of blocks [n] given each block's part: a few random parts at a time, then mixed.

    Keeping `PARTS_TOGETHER` parts together lets a reader hold few parts open.
    """
    numbers, place = np.unique(parts, return_inverse=True)
    rank = np.empty(len(numbers), np.int64)
    rank[permutation(len(numbers), seed, epoch, 0)] = np.arange(len(numbers))
    within = np.empty(len(parts), np.int64)
    within[permutation(len(parts), seed, epoch, 1)] = np.arange(len(parts))
    return np.lexsort((within, rank[place] // PARTS_TOGETHER))


def shuffled_batches(
    lengths: Array, batch_tokens: int, seed: int, epoch: int, pool: int
) -> list[Array]:
    """Batches (positions in the pool) of similar length with B * max length <= batch_tokens."""
    mixed = permutation(len(lengths), seed, epoch, 2, pool)
    ordered = mixed[np.argsort(-lengths[mixed], kind="stable")]
    batches = _fill(ordered, lengths, batch_tokens)
    return [batches[number] for number in permutation(len(batches), seed, epoch, 3, pool)]


def plain_batches(lengths: Array, batch_tokens: int) -> list[Array]:
    """Batches in the given order with B * max length <= batch_tokens."""
    return _fill(np.arange(len(lengths)), lengths, batch_tokens)


def _fill(ordered: Array, lengths: Array, batch_tokens: int) -> list[Array]:
    edges, longest, begin = [0], 0, 0
    for place, length in enumerate(lengths[ordered].tolist()):
        longest = max(longest, length)
        if place > begin and longest * (place - begin + 1) > batch_tokens:
            edges.append(place)
            begin, longest = place, length
    edges.append(len(ordered))
    return [ordered[left:right] for left, right in zip(edges[:-1], edges[1:], strict=True)]
