"""Trains on batches of rows of about equal length, which need less padding.

Rows that are alike come together so, from which a small model with a high rate learns less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers import Trainer

from teachonce.support.arrays import permutation

POOLS = 4  # at least, so that each epoch has other batches
POOL = 50  # batches at most: more would hardly pad less


class LengthGrouped(Sampler[int]):
    """Samples every row once, so that the rows of a batch are about equally long.

    Rows are drawn into pools, sorted within each and cut into batches, which come in random order;
    the rows that are left make a short batch at the end. The order is a pure function of lengths,
    batch size, seed and epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. The Trainer calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = permutation(len(self), self.seed, self.epoch, 0)
        count = len(self) // self.batch_size
        whole = count * self.batch_size
        size = self.batch_size * max(1, min(POOL, count // POOLS))
        for begin in range(0, whole, size):
            pool = order[begin : min(begin + size, whole)]
            pool[:] = pool[np.argsort(self.lengths[pool], kind="stable")]
        batches = order[:whole].reshape(count, self.batch_size)
        yield from batches[permutation(count, self.seed, self.epoch, 1)].ravel().tolist()
        yield from order[whole:].tolist()


class LengthGroupedTrainer(Trainer):
    """A Trainer that trains on batches of rows of about equal length.

    The Trainer's own `group_by_length` goes from long to short within a pool. It also sorts the
    rows to predict, so that predictions are in another order than the rows.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGrouped:
        rows: Any = self.train_dataset
        lengths = [_length(row["input_ids"]) for row in rows]
        return LengthGrouped(lengths, self.args.train_batch_size, self.args.seed)


def _length(ids: list[Any]) -> int:
    """Count the tokens of a row; of a row of several texts those of the longest."""
    return max(map(len, ids)) if isinstance(ids[0], list) else len(ids)
