"""The batches of each epoch, and their endless, resumable stream, prepared by a thread or by
processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable, Iterator
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


class Epochs:
    """Yields the batches of each epoch of a store: a pure function of the arguments and the epoch.

    check, batching: arguments of `FeatureStore.stream`; batching is `batch_tokens` or
        `batch_texts`.
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
        """Count the batches of an epoch. Only the lengths of sequences are read."""
        return self._store.batch_count(self._seed, epoch, **self._batching, blocks=self._blocks)

    def batches(self, epoch: int, first: int = 0, every: int = 1) -> Iterator[StudentBatch]:
        """Yield every `every`-th batch of an epoch, starting with batch `first`. States and maps
        stay encoded until `StudentBatch.to`."""
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
            # Keyed by the number in the epoch: workers, processes and resuming change no mask.
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
    """Yield every `every`-th batch of an endless sequence of epochs, starting with batch `first`.

    device: the device to which batches are moved; None leaves them encoded, for another process.
    order: the other arguments of `Epochs`.
    """
    epochs = Epochs(store, collator, blocks, **order)
    epoch = 0
    while True:
        epoch_batches = epochs.count(epoch)
        if first < epoch_batches:
            for batch in epochs.batches(epoch, first, every):
                yield batch if device is None else batch.to(device)
            # Rounded up: the stride goes on in the next epoch, so no batch is left out or repeated.
            first += -(-(epoch_batches - first) // every) * every
        epoch, first = epoch + 1, first - epoch_batches


def prepared_batches(
    store: FeatureStore, collator: Collator, blocks: Array, workers: int, **order: Any
) -> Generator[StudentBatch]:
    """Prepare `student_batches` in a thread, or in `workers` processes.

    Batches and their order do not depend on `workers`.
    """
    if not workers:
        # `check` compares arrays with their checksums: no student is trained on damaged data.
        batches = student_batches(store, collator, blocks, check=True, **order)
        return prefetched(batches, ready(collator))
    if order.get("device", CPU) != CPU:
        order["device"] = None  # only the training's own process uses the device
    shares = _Shares(store, collator, blocks, order)
    # Not `fork`: a fork of this process would inherit locks of threads that it does not have.
    context = multiprocessing.get_context("forkserver")
    # The server imports this module and torch once; its workers are forked with both loaded.
    context.set_forkserver_preload([__name__])
    # The server must not import modules from the current folder, which may be untrusted.
    with variable("PYTHONSAFEPATH", "1"):
        forkserver.ensure_running()
    loader = DataLoader(
        shares,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        prefetch_factor=1 if collator.has_all_logits else 2,  # of each process
    )
    return _raised(store, collator, loader)


def _raised(
    store: FeatureStore, collator: Collator, batches: Iterable[StudentBatch | UserError | OSError]
) -> Generator[StudentBatch]:
    for batch in _alive(batches):
        if isinstance(batch, FileNotFoundError):
            # `feature-store forget` removes the cached tokens before it rewrites the store.
            store.watch.check()
            raise StoreError(f"{store.path}: its cache file {batch.filename} was deleted; {AGAIN}")
        if isinstance(batch, UserError | OSError):
            raise batch
        yield batch.with_head(collator.distributions.whole)


def _alive(batches: Iterable[Batch]) -> Generator[Batch]:
    try:
        yield from batches
    except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
        # RuntimeError is the loader's. The others: a worker announced a batch and ended before
        # this process had received it.
        if isinstance(error, RuntimeError) and "DataLoader worker (pid" not in str(error):
            raise
        raise UserError(
            f"a process of --workers was killed ({first_line(error)}), probably because memory ran"
            " out; continue with --resume and fewer --workers"
        ) from error


class _Shares(IterableDataset[StudentBatch | UserError | OSError]):
    """Makes batches w, w + W, ... in DataLoader worker w of W; the loader reads the workers in
    turn."""

    def __init__(
        self, store: FeatureStore, collator: Collator, blocks: Array, order: dict[str, Any]
    ) -> None:
        # Pickled here, unpickled in `__iter__`: a worker that failed to open the store while it
        # started would print a traceback, and the loader would not receive the error.
        self._parts = bytes(ForkingPickler.dumps((store, collator, blocks, order)))

    def __iter__(self) -> Iterator[StudentBatch | UserError | OSError]:
        worker = get_worker_info()
        assert worker is not None
        try:
            store, collator, blocks, order = ForkingPickler.loads(self._parts)
            every = order.get("every", 1)
            order |= {
                "first": order["first"] + worker.id * every,
                "every": every * worker.num_workers,
                "check": True,
            }
            for batch in student_batches(store, collator, blocks, **order):
                yield batch.with_head(None)
        except (UserError, OSError) as error:
            # Passed on as a value: the loader would put a traceback into its message.
            yield error
