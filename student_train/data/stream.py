"""The batches of each epoch, and their endless, resumable stream, prepared by a thread or by
processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import forkserver
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from teachonce.store import FeatureStore, StoreError
from teachonce.store.read.change_watch import AGAIN
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import view_of
from teachonce.student_train.data.collator import Collator
from teachonce.support.arrays import Array
from teachonce.support.background import prefetched
from teachonce.support.environment import variable
from teachonce.support.errors import UserError, first_line

# Batches prepared ahead: enough to hide a slow block, and small compared with the store's own pool,
# unless they have a logit for each piece (see `ready`).
READY = 4
CPU = torch.device("cpu")
Batch = TypeVar("Batch")


def ready(collator: Collator) -> int:
    """Return the number of batches to prepare ahead."""
    return 1 if collator.has_all_logits else READY


@dataclass(frozen=True)
class BatchOrder:
    """Chooses the batches of a store and their order: a pure function of the fields.

    view: the view to read; None for the masked views in turn.
    batching: the size of a batch, as an argument of `FeatureStore.stream`.
    first, every: start with batch number `first`, then yield every `every`-th.
    """

    store: FeatureStore
    collator: Collator
    blocks: Array
    seed: int
    view: int | None
    batching: Mapping[str, Any]
    first: int = 0
    every: int = 1

    def count(self, epoch: int) -> int:
        """Count all batches of an epoch. Only the lengths of sequences are read."""
        return self.store.batch_count(self.seed, epoch, **self.batching, blocks=self.blocks)

    def share(self, number: int, processes: int) -> BatchOrder:
        """Return the order of the batches that process `number` prepares, if `processes` processes
        prepare the batches in turn."""
        first, every = self.first + number * self.every, self.every * processes
        return replace(self, first=first, every=every)

    def of_epoch(self, epoch: int) -> Iterator[StudentBatch]:
        """Yield batches of one epoch. States and maps stay encoded until `StudentBatch.to`."""
        view = view_of(epoch, self.store.features, self.view)
        stored = self.store.stream(
            self.seed,
            epoch,
            **self.batching,
            view=view,
            features=self.collator.features(),
            blocks=self.blocks,
            skip=self.first,
            every=self.every,
            check=True,  # no student is trained on damaged data
        )
        for number, batch in zip(count(self.first, self.every), stored, strict=False):
            # The key has the batch's number in the epoch: workers, processes and resuming change no
            # mask.
            yield self.collator(batch, view, (self.seed, epoch, number))

    def endless(self, device: torch.device | None = CPU) -> Iterator[StudentBatch]:
        """Yield batches of epoch after epoch without end, on a device; None leaves them encoded,
        for another process."""
        first, epoch = self.first, 0
        while True:
            epoch_batches = self.count(epoch)
            if first < epoch_batches:
                for batch in replace(self, first=first).of_epoch(epoch):
                    yield batch if device is None else batch.to(device)
                # Rounded up, so that every `every`-th batch is taken across epochs, and none is
                # left out or repeated.
                first += -(-(epoch_batches - first) // self.every) * self.every
            epoch, first = epoch + 1, first - epoch_batches


def prepared_batches(
    order: BatchOrder, workers: int, device: torch.device = CPU
) -> Generator[StudentBatch]:
    """Prepare the endless batches of `order` in a thread, or in `workers` processes.

    Batches and their order do not depend on `workers`.
    """
    if not workers:
        return prefetched(order.endless(device), ready(order.collator))
    # Not `fork`: a fork of this process would inherit locks of threads that it does not have.
    context = multiprocessing.get_context("forkserver")
    # The server imports this module and torch once; its workers are forked with both loaded.
    context.set_forkserver_preload([__name__])
    # The server must not import modules from the current folder, which may be untrusted.
    with variable("PYTHONSAFEPATH", "1"):
        forkserver.ensure_running()
    loader = DataLoader(
        _Shares(order, device),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        prefetch_factor=1 if order.collator.has_all_logits else 2,  # of each process
    )
    return _raised(order, loader)


def _raised(
    order: BatchOrder, batches: Iterable[StudentBatch | UserError | OSError]
) -> Generator[StudentBatch]:
    for batch in _alive(batches):
        if isinstance(batch, FileNotFoundError):
            # `feature-store forget` removes the cached tokens before it rewrites the store.
            order.store.watch.check()
            raise StoreError(
                f"{order.store.path}: its cache file {batch.filename} was deleted; {AGAIN}"
            )
        if isinstance(batch, UserError | OSError):
            raise batch
        yield batch.with_head(order.collator.distributions.whole)


def _alive(batches: Iterable[Batch]) -> Generator[Batch]:
    started = False
    try:
        for batch in batches:
            started = True
            yield batch
    except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
        # RuntimeError is the loader's. The others: a worker announced a batch and ended before
        # this process had received it.
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
            raise
        if not started:
            raise UserError(
                f"a process of --workers ended before its first batch ({first_line(error)}): memory"
                " ran out, or it imported your script and ran it again; put the code of a script"
                ' under `if __name__ == "__main__":`, or give fewer --workers'
            ) from error
        raise UserError(
            f"a process of --workers was killed ({first_line(error)}), probably because memory ran"
            " out; continue with --resume and fewer --workers"
        ) from error


class _Shares(IterableDataset[StudentBatch | UserError | OSError]):
    """Makes batches w, w + W, ... in DataLoader worker w of W; the loader reads the workers in
    turn."""

    def __init__(self, order: BatchOrder, device: torch.device) -> None:
        # Pickled here, unpickled in `__iter__`: a worker that failed to open the store while it
        # started would print a traceback, and the loader would not receive the error.
        self._order = bytes(ForkingPickler.dumps(order))
        # Only the training's own process uses a GPU.
        self._device = device if device.type == "cpu" else None

    def __iter__(self) -> Iterator[StudentBatch | UserError | OSError]:
        worker = get_worker_info()
        assert worker is not None
        try:
            order: BatchOrder = ForkingPickler.loads(self._order)
            for batch in order.share(worker.id, worker.num_workers).endless(self._device):
                yield batch.with_head(None)
        except (UserError, OSError) as error:
            # Passed on as a value: the loader would put a traceback into its message.
            yield error
