"""Fine-tuning in batches of rows of about equal length: less padding, but rows that are alike come
together, from which a small model with a high rate learns less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers import Trainer

from support.permutation import permutation

POOLS = 4  # at least, so that batches are others in each epoch
POOL = 50  # batches, at most: more would hardly pad less


class LengthGrouped(Sampler[int]):
    """Every row once; those of a batch are about equally long, since it is padded to its longest.

    Rows are drawn into pools, sorted within each and cut into batches, which come in random order;
    what is left at the end is a short batch of any rows. The order is a pure function of
    (lengths, batch size, seed, epoch).
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The Trainer calls it before each epoch."""
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

    The Trainer's own `group_by_length` goes from long to short within a pool, and sorts what is
    predicted, too, whose order is then not that of the rows.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGrouped:
        rows: Any = self.train_dataset
        lengths = [len(row["input_ids"]) for row in rows]
        return LengthGrouped(lengths, self.args.train_batch_size, self.args.seed)
