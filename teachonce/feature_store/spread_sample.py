"""A sample of a store: blocks of sequences, spread evenly over it. It is the same in every run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teachonce.store.read.store import FeatureStore
from teachonce.support.arrays import Array
from teachonce.support.console import counted

# The chunks of a Zarr store have as many tokens (FORMAT.md, 3): smaller blocks decode no less.
BLOCK_TOKENS = 4096


@dataclass(frozen=True)
class SpreadSample:
    """Holds a sample: `blocks`, int64 [n, 2], are ranges begin..end of consecutive sequences.

    sequences: the number of sequences in the blocks. all: the number in the store.
    """

    blocks: Array
    sequences: int
    all: int

    @property
    def whole(self) -> bool:
        """Return whether the sample is the whole store."""
        return self.sequences == self.all

    @property
    def summary(self) -> str:
        """Describe the sample: `all 24 sequences`, `8 of 24 sequences, spread evenly`."""
        if self.whole:
            return f"all {counted(self.all, 'sequence')}"
        return f"{self.sequences:,} of {counted(self.all, 'sequence')}, spread evenly"


def spread_sample(store: FeatureStore, tokens: int) -> SpreadSample:
    """Choose blocks of about `tokens` tokens in total, or all blocks if the store has fewer."""
    blocks, most = store.blocks(BLOCK_TOKENS), max(1, tokens // BLOCK_TOKENS)
    if len(blocks) > most:
        # Even steps instead of random draws: two runs of a command report the same numbers.
        blocks = blocks[np.linspace(0, len(blocks) - 1, most).astype(int)]
    return SpreadSample(blocks, int(np.diff(blocks, axis=1).sum()), len(store))
