"""Which blocks of a store, and which of its views, a training reads; without torch, so that what is
wrong with them is told before torch is loaded."""

from __future__ import annotations

import math

import numpy as np

from teachonce.store import Features, FeatureStore
from teachonce.student_train.data.gold_labels import labelled
from teachonce.student_train.settings.options import TrainOptions
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

SMALLEST_BLOCK, GREATEST_BLOCK = 128, 4096  # tokens
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
        long = f" of at least {options.min_length} tokens" if options.min_length else ""
        raise UserError(
            f"{store.path}: has no sequence{which}{long} to train on; dump a corpus with such text"
            " as well, or choose --data and --min-length accordingly"
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
