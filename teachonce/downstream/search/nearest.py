"""Finds the documents nearest to each query, exactly, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from teachonce.support.arrays import Array, Floats

QUERIES_AT_ONCE = 256


class Nearest:
    """Keeps the `depth` best documents of each of `queries` [Q,W], while documents come in blocks.

    Similarity is the dot product. Of equal ones the document that came first is the nearer.
    """

    def __init__(self, queries: Floats, depth: int) -> None:
        self.queries, self.depth = queries, depth
        self.scores: Floats = np.zeros((len(queries), 0), np.float32)
        self.places: Array = np.zeros((len(queries), 0), np.int64)
        self.seen = 0

    def add(self, documents: Floats) -> None:
        """Take in the next documents [N,W]."""
        kept = [
            self._best(slice(begin, begin + QUERIES_AT_ONCE), documents)
            for begin in range(0, len(self.queries), QUERIES_AT_ONCE)
        ]
        self.scores, self.places = (np.concatenate(part) for part in zip(*kept, strict=True))
        self.seen += len(documents)

    def _best(self, rows: slice, documents: Floats) -> tuple[Floats, Array]:
        """Choose of what some rows have kept and of new documents."""
        found = self.queries[rows] @ documents.T
        places = self.seen + np.broadcast_to(np.arange(len(documents)), found.shape)
        scores = np.concatenate([self.scores[rows], found], axis=1)
        places = np.concatenate([self.places[rows], places], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.depth]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def nearest(queries: Floats, blocks: Iterable[Floats], depth: int) -> Nearest:
    """Search all `blocks` of documents [N,W] for the `depth` nearest to each of `queries` [Q,W]."""
    found = Nearest(queries, depth)
    for block in blocks:
        found.add(block)
    return found
