"""The transformers Trainer for tasks: batches of rows of about equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import Trainer

POOL = 50  # batches that rows are sorted within: fewer pad more, more make the same batches again


class LengthGrouped(Sampler[int]):
    """Every row once, in random order, but for neighbours of a batch being about equally long.

    A batch is padded to its longest row: of 16 sentences in any order, half is padding.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        pools = torch.randperm(len(self)).split(POOL * self.batch_size)
        batches = [
            batch
            for pool in pools
            for batch in pool[self.lengths[pool].argsort()].split(self.batch_size)
        ]
        # A short batch comes last: amid the others it would shift them.
        full = batches[: len(self) // self.batch_size]
        for number in torch.randperm(len(full)):
            yield from full[number].tolist()
        for batch in batches[len(full) :]:
            yield from batch.tolist()


class TaskTrainer(Trainer):
    """A Trainer that trains on batches of rows of about equal length.

    The Trainer's own `group_by_length` also sorts what is predicted, whose order is then not that
    of the rows.
    """

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGrouped:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        return LengthGrouped([len(row["input_ids"]) for row in rows], self.args.train_batch_size)
