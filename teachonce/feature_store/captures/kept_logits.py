"""Brings captured log-probabilities into the form of a store's tier `topk`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError

SLACK = 0.05  # a capture in bfloat16, or of a fitted curve, sums to a little over 1


def best_first(
    ids: Array, logprobs: Floats, size: int, where: str, tally: Counter[str]
) -> tuple[Array, Floats, Floats]:
    """Return ids and log-probabilities [T,size], best first, and the log of what is left over [T].

    A place that the capture leaves empty (-inf) gets the best id of its row and -inf: it adds
    nothing to the distribution, and takes nothing of what is left over. `tally` counts the rows
    with empty places as `partial`, and as `over` those that sum to more than 1, of which nothing is
    left. Raises UserError for what are no log-probabilities of one token.
    """
    if np.isnan(logprobs).any():
        row = int(np.isnan(logprobs).any(axis=1).argmax())
        raise UserError(
            f"{where}, token {row}: a log-probability is NaN; capture that sample again, or take it"
            " out"
        )
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :size]
    values = np.take_along_axis(logprobs, order, axis=1)
    best = np.take_along_axis(ids, order, axis=1)
    total = np.exp(values.astype(np.float64)).sum(axis=1)
    bad = (total > 1 + SLACK) | (values[:, 0] > SLACK) | np.isneginf(values[:, 0])
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f"{where}, token {row}: the probabilities of the kept ids sum to {total[row]:.3g}: they"
            " are no log-probabilities of one token (raw logits, of which nobody knows the sum over"
            " the vocabulary, or other settings of compression)"
        )
    if (missing := size - values.shape[1]) > 0:
        values = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
        best = np.pad(best, ((0, 0), (0, missing)))
    empty = np.isneginf(values)
    best = np.where(empty, best[:, :1], best)
    tally["partial"] += int(empty.any(axis=1).sum())
    tally["over"] += int((total >= 1).sum())
    with np.errstate(divide="ignore"):
        rest = np.log1p(-np.minimum(total, 1))
    return best, np.minimum(values, 0).astype(np.float32), rest.astype(np.float32)
