"""Samples of a store: what is looked at where a store is too large to look at all of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teachonce.store.read.store import FeatureStore
from teachonce.support.arrays import Array
from teachonce.support.console import counted

BLOCK_TOKENS = 4096


@dataclass(frozen=True)
class Sample:
    """Blocks [n, 2] of consecutive sequences, and how many sequences there are in them and in
    `all` of the store."""

    blocks: Array
    sequences: int
    all: int

    @property
    def whole(self) -> bool:
        return self.sequences == self.all

    @property
    def told(self) -> str:
        """Which sequences these are: `all 24 sequences`, `8 of 24 sequences, spread evenly`."""
        if self.whole:
            return f"all {counted(self.all, 'sequence')}"
        return f"{self.sequences:,} of {counted(self.all, 'sequence')}, spread evenly"


def sample(store: FeatureStore, tokens: int) -> Sample:
    """Choose blocks of about `tokens` tokens together, spread evenly over a store; all of a store
    that has no more. Always the same ones."""
    blocks, most = store.blocks(BLOCK_TOKENS), max(1, tokens // BLOCK_TOKENS)
    if len(blocks) > most:
        blocks = blocks[np.linspace(0, len(blocks) - 1, most).astype(int)]
    return Sample(blocks, int(np.diff(blocks, axis=1).sum()), len(store))
