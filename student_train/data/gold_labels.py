"""The sequences of a store that have gold labels."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from teachonce.store import FeatureStore
from teachonce.support.arrays import Array

_KNOWN: WeakKeyDictionary[FeatureStore, Array] = WeakKeyDictionary()


def labelled(store: FeatureStore) -> Array:
    """Tell which of all sequences have a gold label, or a tag: bool [n]. An open store is read
    once."""
    if store not in _KNOWN:
        _KNOWN[store] = np.concatenate(
            [
                np.zeros(0, bool),
                *(_of_part(store, place) for place in range(len(store.manifest.parts))),
            ]
        )
    return _KNOWN[store]


def has_gold(store: FeatureStore, blocks: Array | None = None) -> bool:
    """Tell whether any sequence of the blocks [n,2], or of the store, has a gold label or a tag."""
    known = labelled(store)
    if blocks is None:
        return bool(known.any())
    return any(known[begin:end].any() for begin, end in blocks.tolist())


def _of_part(store: FeatureStore, place: int) -> Array:
    task, part = store.features.task, store.part(place)
    if task is None:
        return np.zeros(part.part.counts.sequences, bool)
    gold = part.all(task.gold) >= 0
    if task.kind == "classification":
        return gold
    return np.add.reduceat(np.append(gold, False), part.token_start[:-1]) > 0
