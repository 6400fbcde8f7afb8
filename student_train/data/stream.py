"""The batches of each epoch, and their endless, resumable stream; a thread or processes prepare
it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable, Iterator
from itertools import count
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import view_of
from teachonce.student_train.data.collator import Collator
from teachonce.support.arrays import Array
from teachonce.support.background import prefetched
from teachonce.support.environment import variable
from teachonce.support.errors import UserError

READY = 4  # batches prepared ahead: enough to hide a slow block, small beside the store's own pool
CPU = torch.device("cpu")


class Epochs:
    """The batches of each epoch of a store: a pure function of the arguments and the epoch.

    `batching` bounds a batch: batch_tokens or batch_texts, as of `FeatureStore.stream`, which takes
    `check`, too.
    """

    def __init__(
        self,
        store: FeatureStore,
        collator: Collator,
        blocks: Array,
        *,
        seed: int,
        view: int | None,
        check: bool = False,
        **batching: Any,
    ) -> None:
        self._store, self._collator, self._blocks = store, collator, blocks
        self._seed, self._view, self._check, self._batching = seed, view, check, batching

    def count(self, epoch: int) -> int:
        """Count the batches of an epoch; this reads lengths alone."""
        return self._store.batch_count(self._seed, epoch, **self._batching, blocks=self._blocks)

    def batches(self, epoch: int, first: int = 0, every: int = 1) -> Iterator[StudentBatch]:
        """Yield batches of an epoch, from number `first` on, one of `every`. States and maps are
        encoded until `StudentBatch.to`."""
        view = view_of(epoch, self._store.features, self._view)
        stored = self._store.stream(
            self._seed,
            epoch,
            **self._batching,
            view=view,
            features=self._collator.features(),
            blocks=self._blocks,
            skip=first,
            every=every,
            check=self._check,
        )
        for number, batch in zip(count(first, every), stored, strict=False):
            yield self._collator(batch, view, (self._seed, epoch, number))


def student_batches(
    store: FeatureStore,
    collator: Collator,
    blocks: Array,
    *,
    first: int = 0,
    every: int = 1,
    device: torch.device | None = CPU,
    **order: Any,
) -> Iterator[StudentBatch]:
    """Yield batches of epoch 0, 1, 2 and so on without end, from batch number `first` on, one of
    `every`: a pure function of the arguments. `order` is that of `Epochs`.

    They are moved to `device`; with None they stay encoded, for another process to move.
    """
    epochs = Epochs(store, collator, blocks, **order)
    epoch = 0
    while True:
        there = epochs.count(epoch)
        if first < there:
            for made in epochs.batches(epoch, first, every):
                yield made if device is None else made.to(device)
            first += -(-(there - first) // every) * every
        epoch, first = epoch + 1, first - there


def loaded(
    store: FeatureStore, collator: Collator, blocks: Array, workers: int, **order: Any
) -> Generator[StudentBatch]:
    """Prepare `student_batches` in a thread, or in `workers` processes.

    Batches and their order do not depend on their number.
    """
    if not workers:
        return prefetched(student_batches(store, collator, blocks, check=True, **order), READY)
    if order.get("device", CPU) != CPU:
        order["device"] = None  # only the training's own process uses the device
    shares = _Shares(store, collator, blocks, order)
    context = multiprocessing.get_context("forkserver")  # a fork of this process has dead threads
    context.set_forkserver_preload([__name__])
    with variable("PYTHONSAFEPATH", "1"):  # the current folder may be a stranger's
        forkserver.ensure_running()
    loader = DataLoader(
        shares, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    return _raised(loader)


def _raised(found: Iterable[StudentBatch | UserError]) -> Generator[StudentBatch]:
    for batch in found:
        if isinstance(batch, UserError):
            raise batch
        yield batch


class _Shares(IterableDataset[StudentBatch | UserError]):
    """Makes the batches w, w + W, ... in worker w of W; a loader takes them in turn."""

    def __init__(
        self, store: FeatureStore, collator: Collator, blocks: Array, order: dict[str, Any]
    ) -> None:
        self.store, self.collator, self.blocks, self.order = store, collator, blocks, order

    def __iter__(self) -> Iterator[StudentBatch | UserError]:
        worker = get_worker_info()
        assert worker is not None
        every = self.order.get("every", 1)
        first = self.order["first"] + worker.id * every
        order = {**self.order, "first": first, "every": every * worker.num_workers, "check": True}
        try:
            yield from student_batches(self.store, self.collator, self.blocks, **order)
        except UserError as error:  # the loader would raise it with a traceback in its message
            yield error
