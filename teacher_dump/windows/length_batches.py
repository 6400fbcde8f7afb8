"""Batches of windows of like length, so that padding is small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from support.arrays import Array


def length_batches(lengths: Sequence[int] | Array, batch_tokens: int) -> list[Array]:
    """Group row numbers so that rows x longest row <= batch_tokens (a longer row is a batch
    alone), longest first.

    Longest first: a batch too large for the device shows at once, not after hours.
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
    """Token ids [B,L] filled up with `padding`, and where there is a token [B,L]."""
    lengths = np.array([len(row) for row in rows])
    present = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(present.shape, padding, np.int64)
    ids[present] = np.concatenate(rows)
    return ids, present
