"""Find the nearest neighbours of sequences in a store, by the cosine of stored vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from teachonce.feature_store.spread_sample import SpreadSample, spread_sample
from teachonce.store import Batch, FeatureStore
from teachonce.support.arrays import Array, Floats

COUNT = 8  # most neighbours of a sequence
# The sample is smaller for states, because a state is decoded for each token, but a vector once for
# each text.
EMBEDDINGS, STATES = 2**20, 2**18
"""Tokens of the sample: with stored vectors, and with vectors that are computed from states."""
BATCH_TOKENS = 2**15


@dataclass(frozen=True)
class Nearest:
    """Holds the nearest neighbours of the requested sequences.

    about: which vectors were compared, as text. among: the sample that was searched.
    neighbours: for each sequence its nearest sequences and their cosines, the nearest first.
    """

    about: str
    among: SpreadSample | None = None
    neighbours: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


def nearest_sequences(store: FeatureStore, numbers: Sequence[int]) -> Nearest:
    """Find the nearest neighbours of the sequences `numbers`.

    Compares the teacher's vectors of whole texts or, if the store has no vectors, the mean hidden
    states. In a large store, only a sample is searched.
    """
    if store.features.embedding:
        kind, state, size = "embedding", "", EMBEDDINGS
        about = "the teacher's vectors of whole texts (embedding)"
    elif store.features.hidden:
        names = store.features.hidden
        kind, state, size = "hidden", "mean" if "mean" in names else names[-1], STATES
        about = (
            f"the mean of the normalised hidden state {state!r} over a sequence's tokens (view 0),"
            " because the store has no vectors of whole texts"
        )
    else:
        return Nearest("The store has neither vectors of texts nor hidden states to compare by.")
    among = spread_sample(store, size)
    batches = store.stream(
        blocks=among.blocks, features=(kind,), shuffle=False, batch_tokens=BATCH_TOKENS
    )
    # Copied, because a batch is valid only until the next one.
    rows = [(batch.index.copy(), _vectors(batch, state)) for batch in batches]
    indices = np.concatenate([index for index, _ in rows])
    vectors = np.concatenate([part for _, part in rows])
    # The requested sequences are read again, because in a large store they may be outside the
    # sample.
    queries = next(store.gather([list(numbers)], features=(kind,)))
    cosines = _vectors(queries, state) @ vectors.T
    neighbours = {
        number: _best(indices, line, number) for number, line in zip(numbers, cosines, strict=True)
    }
    return Nearest(f"Compared by {about}.", among, neighbours)


def _best(indices: Array, cosines: Floats, number: int) -> list[tuple[int, float]]:
    order = np.argsort(-cosines, kind="stable")
    order = order[indices[order] != number][:COUNT]
    return [(int(indices[position]), float(cosines[position])) for position in order]


def _vectors(batch: Batch, state: str) -> Floats:
    """Compute a vector of length 1 for each sequence of a batch: float32 [B, W]."""
    if state:
        # Normalised by channel: a few channels of large variance would decide every cosine.
        values = batch.hidden[state].normalised()
        values[batch.special] = 0
        # No sequence is empty: for an empty one, reduceat would return the first row of the next
        # sequence. The sum has the direction of the mean, and the length is divided out below.
        vectors = np.add.reduceat(values, batch.start[:-1], axis=0)
    else:
        assert batch.embedding is not None
        vectors = np.array(batch.embedding)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A vector may be all zeros (FORMAT.md, section 6); each of its cosines is then 0.
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
