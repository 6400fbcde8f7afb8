"""Groups windows of like length into batches, so that little is padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from teachonce.support.arrays import Array


def length_batches(lengths: Sequence[int] | Array, batch_tokens: int) -> list[Array]:
    """Group row numbers into batches with rows x longest row <= batch_tokens.

    A longer row is a batch alone. The longest rows come first: a batch that is too large for the
    device shows at once, not after hours.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[Array] = []
    begin = 0
    while begin < len(order):
        count = max(1, batch_tokens // int(lengths[order[begin]]))
        batches.append(order[begin : begin + count])
        begin += count
    return batches


def padded(rows: Sequence[Array], padding: int) -> tuple[Array, Array]:
    """Fill rows up with `padding`: token ids int64 [B,L], and bool [B,L], true where a token is."""
    lengths = np.array([len(row) for row in rows])
    present = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(present.shape, padding, np.int64)
    ids[present] = np.concatenate(rows)
    return ids, present
