"""Which sequences of a store have gold labels."""

from __future__ import annotations

import numpy as np

from store import FeatureStore


def has_gold(store: FeatureStore, blocks: np.ndarray | None = None) -> bool:
    """Whether any sequence of the blocks, or of the store, has a gold label or a tag."""
    rows = store.blocks() if blocks is None else blocks
    return any(labelled(store, begin, end).any() for begin, end in rows.tolist())


def labelled(store: FeatureStore, begin: int, end: int) -> np.ndarray:
    """bool [end - begin]: which sequences of a block have a gold label, or a tag."""
    task = store.features.task
    if task is None:
        return np.zeros(end - begin, bool)
    part, first = store.locate(begin)
    last = first + end - begin
    if task.kind == "classification":
        return part.read(task.gold, first, last) >= 0
    start = part.token_start[first : last + 1]
    tagged = part.read(task.gold, int(start[0]), int(start[-1])) >= 0
    return np.add.reduceat(np.append(tagged, False), start[:-1] - start[0]) > 0
