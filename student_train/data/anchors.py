"""Anchors: texts of a store with whose vectors every text is compared, in every batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from teachonce.store import FeatureStore
from teachonce.student_train.data.blocks import split_blocks

# For a static student of 96 numbers and 9,000 pieces 1,024 were worse (rank correlation .673
# instead of .679).
ANCHORS = 4096
ANCHOR_SEED = 3


def read_anchors(store: FeatureStore, held_out: float) -> Tensor:
    """Return the teacher's vectors [M,W] of at most `ANCHORS` texts that are not held out.

    They are of blocks from all of the store, drawn with a seed of their own, so every training of a
    store has the same. Raises UserError if the store is too small to hold texts out, and
    StoreError if it is damaged.
    """
    blocks = split_blocks(store, held_out)[0]
    drawn = np.random.default_rng(ANCHOR_SEED).permutation(len(blocks))
    texts = np.cumsum(np.diff(blocks[drawn], axis=1))
    enough = blocks[np.sort(drawn[: int(np.searchsorted(texts, ANCHORS)) + 1])]
    pool = max(1, len(enough))
    batches = store.stream(
        batch_texts=ANCHORS, blocks=enough, pool_blocks=pool, features="embedding", shuffle=False
    )
    # The arrays of a batch are valid until the next one.
    return torch.from_numpy(np.array(next(batches).embedding, np.float32))
