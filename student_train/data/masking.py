"""Masks: the tokens that are hidden from the student, and what it reads in their place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teachonce.align import Tokens
from teachonce.support.arrays import Array, covering_spans_of_texts
from teachonce.training.rare_masks import rare_weights, waits

IGNORED = -100
MASK, RANDOM = 0, 1  # actions of a stored span; any other leaves the tokens as they are


@dataclass(frozen=True)
class MaskedTokens:
    """Holds flat token ids int64 [N] as the student reads them, and labels int64 [N]: the id to
    predict, or IGNORED."""

    ids: Array
    labels: Array


class Masker:
    """Masks a share `probability` of the tokens as BERT does (Devlin et al. 2019, section 3.1): of
    those chosen 80 % become the mask, 10 % a random piece, 10 % stay. Special tokens are never
    chosen.

    With the `counts` [V] of all pieces, rare ones are chosen more often: as count^-0.7 (Sanh et al.
    2019, after Lample & Conneau 2019). Of a sequence no more than `most` tokens are chosen, if that
    is given. Every draw comes from an explicit key.
    """

    def __init__(
        self,
        mask_id: int,
        vocabulary: int,
        special_ids: set[int],
        probability: float,
        counts: Array | None = None,
        most: int | None = None,
    ) -> None:
        self.mask_id, self.probability, self.most = mask_id, probability, most
        self.weights = None if counts is None else rare_weights(counts)
        self.ordinary = np.array([i for i in range(vocabulary) if i not in special_ids])

    def dynamic(self, tokens: Tokens, key: tuple[int, ...]) -> MaskedTokens:
        """Mask tokens chosen one by one, anew for each `key`."""
        rng = np.random.default_rng(key)
        order = rng.random(len(tokens.ids))
        if self.weights is None:
            chosen = (order < self.probability) & ~tokens.special
        else:
            order = waits(order, self.weights[np.asarray(tokens.ids)])
            chosen = self._weighted(tokens, order)
        if self.most is not None:
            chosen = _first_of_each(tokens, chosen, order, self.most)
        action = np.searchsorted([0.8, 0.9], rng.random(len(tokens.ids)), side="right")
        return self._apply(tokens, chosen, action, rng)

    def _weighted(self, tokens: Tokens, order: Array) -> Array:
        """Choose a share of the ordinary tokens: those that wait the least."""
        order = np.where(tokens.special, np.inf, order)
        count = round(self.probability * int((~tokens.special).sum()))
        chosen = np.zeros(len(order), bool)
        chosen[np.argsort(order, kind="stable")[:count]] = True
        return chosen

    def stored(
        self, tokens: Tokens, spans: Array, spans_start: Array, key: tuple[int, ...]
    ) -> MaskedTokens:
        """Mask the words that the teacher saw masked. `spans` [M,3] are (begin, end, action); the
        spans of sequence b begin at spans_start[b].

        A token is masked if it shares a character with a span, whatever its boundaries.
        """
        rng = np.random.default_rng(key)
        span = covering_spans_of_texts(
            tokens.offsets, np.diff(tokens.start), spans, np.diff(spans_start)
        )
        chosen = (span >= 0) & ~tokens.special
        action = np.where(chosen, spans[span, 2] if len(spans) else 0, 2)
        return self._apply(tokens, chosen, action, rng)

    def _apply(
        self, tokens: Tokens, chosen: Array, action: Array, rng: np.random.Generator
    ) -> MaskedTokens:
        ids = np.asarray(tokens.ids).astype(np.int64)
        labels = np.where(chosen, ids, IGNORED)
        others = rng.choice(self.ordinary, len(ids))
        ids = np.where(chosen & (action == MASK), self.mask_id, ids)
        ids = np.where(chosen & (action == RANDOM), others, ids)
        return MaskedTokens(ids, labels)


def _first_of_each(tokens: Tokens, chosen: Array, order: Array, most: int) -> Array:
    """Keep of the chosen tokens of each sequence the `most` that come first in an order."""
    sequence = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((order[rows], sequence[rows]))]
    first = np.searchsorted(sequence[rows], sequence[rows])
    kept = np.zeros(len(chosen), bool)
    kept[rows[np.arange(len(rows)) - first < most]] = True
    return kept
