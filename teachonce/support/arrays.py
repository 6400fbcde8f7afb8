"""Types of arrays, flat arrays of ragged rows, runs, spans of characters, random permutations."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]


def starts(sizes: ArrayLike) -> Array:
    """Return the first index of each of n rows in a flat array, followed by the total size: sizes
    of the rows [n] -> int64 [n + 1]."""
    # int64 by request: the sum of unsigned sizes is uint64, which NumPy joins with 0 to float64.
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def begins(sizes: ArrayLike) -> Array:
    """Return the first index of each of n rows in a flat array: sizes of the rows [n] -> int64
    [n]."""
    return starts(sizes)[:-1]


def ranges(begin: Array, sizes: Array) -> Array:
    """Return the numbers of several ranges in one array, int64 [sum of sizes]. Range i starts with
    begin[i] and has sizes[i] numbers."""
    start = starts(sizes)
    return np.repeat(begin - start[:-1], sizes) + np.arange(start[-1])


def spread(count: int, most: int) -> list[int]:
    """Return `most` of the numbers 0..count-1, evenly spaced; all of them if there are fewer."""
    return [int(number) for number in np.unique(np.linspace(0, count - 1, most).astype(int))]


def runs_of_equal(values: Array) -> tuple[Array, Array]:
    """Return the first and the last index of each group of equal, consecutive values. Values must
    be at least 0."""
    edges = np.flatnonzero(np.diff(values, prepend=-1, append=-1))
    return edges[:-1], edges[1:] - 1


def permutation(length: int, *seed: int) -> Array:
    """Return a random permutation of 0..length-1 that depends only on the seed.

    The raw output of PCG64 is the same in all versions of NumPy (its distributions are not), so a
    seed gives the same order in all versions.
    """
    raw = np.random.PCG64(np.random.SeedSequence(list(seed))).random_raw(length)
    order = np.argsort(raw)  # takes a third of the time of a stable sort; equal to it without ties
    drawn = raw[order]
    return np.argsort(raw, kind="stable") if (drawn[1:] == drawn[:-1]).any() else order


def covering_spans(begin: Array, end: Array, span_begin: Array, span_end: Array) -> Array:
    """Return for each token of a text the index of the first span that shares a character with it:
    int64 [N], -1 if no span does.

    Tokens [N] and spans [M] are begin..end in characters; the spans ascend and are disjoint. No
    span covers a token without characters.
    """
    if not len(span_begin):
        return np.full(len(begin), -1)
    # "right": a span that ends where a token begins shares no character with it.
    index = np.minimum(np.searchsorted(span_end, begin, "right"), len(span_begin) - 1)
    shared = (span_begin[index] < end) & (span_end[index] > begin) & (begin < end)
    return np.where(shared, index, -1)


def covering_spans_of_texts(
    offsets: Array, lengths: Array, spans: Array, span_counts: Array
) -> Array:
    """Compute `covering_spans` for B texts at once: for each token the row number in `spans`, or
    -1: int64 [N].

    offsets: [N, 2], the tokens of all texts. lengths: [B], the number of tokens of each text.
        spans: [M, 2 or more]; the first two columns are begin and end. span_counts: [B], the number
        of spans of each text.
    """
    if not len(spans):
        return np.full(len(offsets), -1)
    texts = np.arange(len(lengths))
    # Positions of text number i are shifted by i times a number above all positions, so that texts
    # do not overlap.
    stretch = int(max(offsets.max(initial=0), spans[:, :2].max())) + 1
    token = np.repeat(texts, lengths) * stretch
    span = np.repeat(texts, span_counts) * stretch
    return covering_spans(
        offsets[:, 0] + token, offsets[:, 1] + token, spans[:, 0] + span, spans[:, 1] + span
    )
