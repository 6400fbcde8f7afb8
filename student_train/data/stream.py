"""The endless, resumable stream of student batches; a thread or processes prepare it."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from store import Features, FeatureStore
from student_train.data.batch import StudentBatch
from student_train.data.collator import Collator
from student_train.data.gold_labels import labelled
from student_train.data.similar import similar_batches
from student_train.settings.options import TrainOptions
from support.arrays import Array, ranges
from support.background import prefetched
from support.errors import UserError

SMALLEST_BLOCK, GREATEST_BLOCK = 128, 4096  # tokens
READY = 4  # batches prepared ahead: enough to hide a slow block, small beside the store's own pool
CPU = torch.device("cpu")
SPLIT_SEED = (
    0  # not the student's seed: all students of a store are judged on the same held-out blocks
)


def split_blocks(store: FeatureStore, held_out: float) -> tuple[Array, Array]:
    """Choose blocks [n,2] to train on and blocks to hold out, once and for all for a store and a
    share.

    For a task the share is taken of the blocks with gold labels, and again of the others, as
    labelled text often stands together. Raises UserError if the store has too little text to hold
    something out.
    """
    tokens = int(store.meta["tokens"])
    if store.features.task:
        blocks = store.blocks(SMALLEST_BLOCK)
        gold = np.logical_or.reduceat(labelled(store), blocks[:, 0])  # blocks follow one another
    else:
        size = tokens * max(held_out, 0.005) / 4
        blocks = store.blocks(int(np.clip(size, SMALLEST_BLOCK, GREATEST_BLOCK)))
        gold = np.zeros(len(blocks), bool)
    chance, held = np.random.default_rng(SPLIT_SEED), np.zeros(len(blocks), bool)
    for alike in (np.flatnonzero(~gold), np.flatnonzero(gold)):
        count = max(1, round(len(alike) * held_out)) if held_out else 0
        if len(alike) > 1:
            held[alike[chance.permutation(len(alike))[:count]]] = True
    if held.all() or held.any() != bool(held_out):
        raise UserError(
            f"the store has {tokens} tokens: too few to hold out a share of {held_out:g}; dump more"
            " text"
        )
    return blocks[~held], blocks[held]


def chosen_blocks(store: FeatureStore, blocks: Array, options: TrainOptions) -> Array:
    """Cut blocks [n,2] to the runs of sequences that `--data` and `--min-length` let through, of
    one share (see `TrainOptions.shares`).

    Raises UserError where none is left.
    """
    if options.data == "all" and not options.min_length:
        return blocks
    runs = [np.empty((0, 2), np.int64)]
    for begin, end in blocks.tolist():
        chosen = store.lengths(begin, end) >= options.min_length
        if options.data != "all":
            chosen &= labelled(store)[begin:end] == (options.data == "labelled")
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        runs.append(edges.reshape(-1, 2) + begin)
    found = np.concatenate(runs)
    if not len(found):
        told = {"labelled": " with a gold label", "unlabelled": " without a gold label"}
        which = told.get(options.data, "")
        raise UserError(
            f"{store.path}: no sequence{which} of at least {options.min_length} tokens to"
            " train on; choose --data and --min-length accordingly, or dump such text"
        )
    return found


def view_of(epoch: int, features: Features, asked: int | None) -> int:
    """Return the view that an epoch reads: the one asked for, else the masked views in turn, else
    the plain one, as for a task."""
    if asked is not None:
        return asked
    masked = 0 if features.task else features.views - 1
    return 1 + epoch % masked if masked else 0


def told_of_masks(features: Features, asked: int | None, epochs: float) -> str:
    """Tell in a line which masked views so many epochs read and whether their masks come again; ""
    where the student draws masks of its own (view 0), as it does anew each time."""
    count = math.ceil(epochs)
    read = [view_of(epoch, features, asked) for epoch in range(min(count, features.views))]
    if not read or read[0] == 0:
        return ""
    different = len(set(read))
    if different == count:
        return f"a masked view an epoch, {', '.join(map(str, read))}: new masks each epoch"
    masked = f"views {', '.join(map(str, sorted(set(read))))} in turn, a view an epoch"
    if different == 1:
        masked = f"view {read[0]} in each epoch"
    return (
        f"masked {masked}: {count} epochs read {different} masks of each text; for new masks each"
        f" epoch dump with --views {count + 1}"
    )


def student_batches(
    store: FeatureStore,
    collator: Collator,
    blocks: Array,
    *,
    seed: int,
    view: int | None,
    first: int = 0,
    every: int = 1,
    device: torch.device | None = CPU,
    check: bool = False,
    sampling: str = "shuffled",
    **batching: Any,
) -> Iterator[StudentBatch]:
    """Yield batches of epoch 0, 1, 2 and so on without end, from batch number `first` on, one of
    `every`: a pure function of the arguments. `batching` bounds a batch: batch_tokens or
    batch_texts, as of `FeatureStore.stream`. `sampling` is that of the options.

    They are moved to `device`; with None they stay encoded, for another process to move. `check`
    goes to `FeatureStore.stream`.
    """
    order = _Similar(store, blocks, seed, **batching) if sampling == "similar" else None
    epoch, skip, before = 0, first, 0  # batches of the epochs before
    while True:
        number = view_of(epoch, store.features, view)
        count = order.count if order else store.batch_count(seed, epoch, **batching, blocks=blocks)
        if skip < count:
            batches = (
                store.gather(order.of(epoch)[skip:], view=number, features=collator.features())
                if order
                else store.stream(
                    seed,
                    epoch,
                    **batching,
                    view=number,
                    blocks=blocks,
                    features=collator.features(),
                    skip=skip,
                    check=check,
                )
            )
            for i, batch in enumerate(batches, skip):
                if (before + i - first) % every == 0:
                    made = collator(batch, number, (seed, epoch, i))
                    yield made if device is None else made.to(device)
        skip = max(0, skip - count)
        epoch, before = epoch + 1, before + count


class _Similar:
    """The batches of similar texts of each epoch. What is read of the store stays in memory."""

    def __init__(self, store: FeatureStore, blocks: Array, seed: int, batch_texts: int) -> None:
        self._vectors, self._seed, self._size = store.embeddings(), seed, batch_texts
        self._members = ranges(blocks[:, 0], blocks[:, 1] - blocks[:, 0])
        self.count = -(-len(self._members) // batch_texts)
        store.keep(lambda name: True)

    def of(self, epoch: int) -> list[Array]:
        """List the batches of an epoch: numbers of sequences."""
        return similar_batches(self._vectors, self._members, self._size, self._seed, epoch)


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
    with _safe_path():
        forkserver.ensure_running()
    loader = DataLoader(
        shares, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    return (batch for batch in loader)


@contextmanager
def _safe_path() -> Generator[None]:
    """Have processes that begin here look for no module in the current folder, which may be a
    stranger's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _Shares(IterableDataset[StudentBatch]):
    """Makes the batches w, w + W, ... in worker w of W; a loader takes them in turn."""

    def __init__(
        self, store: FeatureStore, collator: Collator, blocks: Array, order: dict[str, Any]
    ) -> None:
        self.store, self.collator, self.blocks, self.order = store, collator, blocks, order

    def __iter__(self) -> Iterator[StudentBatch]:
        worker = get_worker_info()
        assert worker is not None
        every = self.order.get("every", 1)
        first = self.order["first"] + worker.id * every
        order = {**self.order, "first": first, "every": every * worker.num_workers}
        order["check"] = worker.id == 0  # each reads the whole store: one is enough to check it
        return student_batches(self.store, self.collator, self.blocks, **order)
