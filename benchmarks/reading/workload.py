"""The work of a reader: the features of a store that it has to deliver, in shuffled batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from teachonce.store import FeatureStore
from teachonce.store.format.layout import ArraySpec, as_read, part_arrays
from teachonce.support.arrays import Array, starts

Arrays = dict[str, Array]
Epoch = Callable[[int], Iterator[Arrays]]
BATCH_TOKENS = 16_384
MAPS = "view0/attention/mean/values"


@dataclass
class Corpus:
    """Holds a store, and all its features in memory for the peers' writers."""

    store: FeatureStore
    batches_of: dict[int, list[Array]] = field(default_factory=dict)

    @cached_property
    def _specs(self) -> dict[str, ArraySpec]:
        specs = as_read(part_arrays(self.store.features, self.store.manifest.parts[0].counts))
        return {name: spec for name, spec in specs.items() if spec.per_token}

    @property
    def names(self) -> list[str]:
        """Return the names of the arrays with a row per token."""
        return list(self._specs)

    @cached_property
    def record(self) -> np.dtype[Any]:
        """Return the dtype of one token, with a field for each such array."""
        return np.dtype([(name, s.dtype, s.shape[1:]) for name, s in self._specs.items()])

    def _whole(self, name: str) -> Array:
        parts = [self.store.part(index) for index in range(len(self.store.manifest.parts))]
        return np.concatenate([part.read(name, 0, part.array(name).shape[0]) for part in parts])

    @cached_property
    def tokens(self) -> Array:
        """Return the records of all tokens [N]."""
        records = np.empty(self.store.meta["tokens"], self.record)
        for name in self.names:
            records[name] = self._whole(name)
        return records

    @cached_property
    def maps(self) -> Array:
        return self._whole(MAPS)

    @cached_property
    def lengths(self) -> Array:
        blocks = self.store.blocks().tolist()
        return np.concatenate([self.store.lengths(begin, end) for begin, end in blocks])

    @cached_property
    def token_start(self) -> Array:
        return starts(self.lengths)

    @cached_property
    def square_start(self) -> Array:
        return starts(self.lengths**2)

    def sequences(self) -> Iterator[tuple[Array, Array]]:
        """Yield records and map of each sequence."""
        edges = pairwise(self.token_start), pairwise(self.square_start)
        for (a, b), (c, d) in zip(*edges, strict=True):
            yield self.tokens[a:b], self.maps[c:d]

    def batches(self, epoch: int) -> list[Array]:
        """Return the sequence numbers of each batch, which all readers with random access share."""
        if epoch not in self.batches_of:
            stream = self.store.stream(0, epoch, BATCH_TOKENS, features=())
            self.batches_of[epoch] = [batch.index for batch in stream]
        return self.batches_of[epoch]

    @property
    def batch_sequences(self) -> int:
        """Return the mean number of sequences per batch, for readers that shuffle by themselves."""
        return -(-len(self.lengths) // len(self.batches(0)))
