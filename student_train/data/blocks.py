"""The blocks and views that a training reads, and which sequences have gold labels."""

# No torch here: mistakes are reported before torch is imported, which takes seconds.

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np

from teachonce.store import Features, FeatureStore
from teachonce.store.format.features import OutputKind
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

SMALLEST_BLOCK, LARGEST_BLOCK = 128, 4096  # tokens
# Not the student's seed: all students of a store are validated on the same held-out blocks.
SPLIT_SEED = 0


def split_blocks(store: FeatureStore, held_out: float) -> tuple[Array, Array]:
    """Return the blocks to train on and the held-out blocks, both int64 [n,2]: sequence numbers
    begin..end, end exclusive.

    held_out: the share of blocks to hold out. The split depends only on the store and this share.

    Raises UserError if the store has too few blocks for both.
    """
    tokens = int(store.meta["tokens"])
    if store.features.task:
        # The smallest blocks, because a block counts as labelled if one of its sequences is.
        blocks = store.blocks(SMALLEST_BLOCK)
        gold = np.logical_or.reduceat(labelled(store), blocks[:, 0])  # blocks follow one another
    else:
        # A block has a quarter of the held-out tokens, so that held-out text comes from several
        # places of the corpus. The share counts as at least half a percent: with a share of 0,
        # every store would be cut into the smallest blocks.
        size = tokens * max(held_out, 0.005) / 4
        blocks = store.blocks(int(np.clip(size, SMALLEST_BLOCK, LARGEST_BLOCK)))
        gold = np.zeros(len(blocks), bool)
    rng, held = np.random.default_rng(SPLIT_SEED), np.zeros(len(blocks), bool)
    # Labelled text is often contiguous: one draw over all blocks could hold out none of it.
    for group in (np.flatnonzero(~gold), np.flatnonzero(gold)):
        count = max(1, round(len(group) * held_out)) if held_out else 0
        if len(group) > 1:
            held[group[rng.permutation(len(group))[:count]]] = True
    if held.all() or held.any() != bool(held_out):
        raise UserError(
            f"{store.path}: has {tokens} teacher tokens: too few to hold out a share of"
            f" {held_out:g} and train on the rest; dump more text, or choose another --held-out"
        )
    return blocks[~held], blocks[held]


def chosen_blocks(
    store: FeatureStore, blocks: Array, data: str = "all", min_length: int = 0
) -> Array:
    """Return the runs of sequences in `blocks` that `--data` and `--min-length` select.

    Blocks and runs are int64 [n,2]: sequence numbers begin..end, end exclusive. Raises UserError if
    no sequence is selected.
    """
    if data == "all" and not min_length:
        return blocks
    runs = [np.empty((0, 2), np.int64)]
    for begin, end in blocks.tolist():
        matches = store.lengths(begin, end) >= min_length
        if data != "all":
            matches &= labelled(store)[begin:end] == (data == "labelled")
        edges = np.flatnonzero(np.diff(matches, prepend=False, append=False))
        runs.append(edges.reshape(-1, 2) + begin)
    selected = np.concatenate(runs)
    if not len(selected):
        labels = {"labelled": " with a gold label", "unlabelled": " without a gold label"}
        which = labels.get(data, "")
        long = f" of at least {min_length} teacher tokens" if min_length else ""
        raise UserError(
            f"{store.path}: has no sequence{which}{long} to train on; dump a corpus with such text"
            " as well, or change --data or --min-length"
        )
    return selected


def view_of(epoch: int, features: Features, requested: int | None) -> int:
    """Return the view that an epoch reads: `--view` (`requested`) if given, else the masked views
    in turn. Stores of a task, and stores without masked views, are read from view 0."""
    if requested is not None:
        return requested
    masked = 0 if features.task else features.views - 1
    return 1 + epoch % masked if masked else 0


def describe_masks(features: Features, requested: int | None, epochs: float) -> str:
    """Describe in a line which masked views are read in `epochs` epochs, and whether masks repeat.
    Return "" for view 0, whose masks are drawn again in each epoch."""
    count = math.ceil(epochs)
    views = [view_of(epoch, features, requested) for epoch in range(min(count, features.views))]
    if not views or views[0] == 0:
        return ""
    different = len(set(views))
    if different == count:
        return f"a masked view an epoch, {', '.join(map(str, views))}: new masks each epoch"
    masked = f"views {', '.join(map(str, sorted(set(views))))} in turn, a view an epoch"
    if different == 1:
        masked = f"view {views[0]} in each epoch"
    return (
        f"masked {masked}: {count} epochs read {different} masks of each text; for new masks each"
        f" epoch dump with --views {count + 1}"
    )


# Weak, so that the cache holds no closed store in memory.
_GOLD: WeakKeyDictionary[FeatureStore, Array] = WeakKeyDictionary()


def labelled(store: FeatureStore) -> Array:
    """Return which sequences have a gold label or tag: bool [n]. The result is cached per open
    store."""
    if store not in _GOLD:
        _GOLD[store] = np.concatenate(
            [
                np.zeros(0, bool),
                *(_gold_of_part(store, index) for index in range(len(store.manifest.parts))),
            ]
        )
    return _GOLD[store]


def has_gold(store: FeatureStore, blocks: Array | None = None) -> bool:
    """Return whether any sequence of the blocks [n,2] has a gold label or tag. Without `blocks`,
    the whole store is examined."""
    gold = labelled(store)
    if blocks is None:
        return bool(gold.any())
    return any(gold[begin:end].any() for begin, end in blocks.tolist())


def output_kind_of(store: FeatureStore) -> OutputKind | None:
    """Return the kind of outputs of a store's task, or None without a task."""
    return store.task.output_kind if store.task else None


def _gold_of_part(store: FeatureStore, index: int) -> Array:
    task, part = store.features.task, store.part(index)
    if task is None:
        return np.zeros(part.part.counts.sequences, bool)
    gold = part.all(task.gold) >= 0
    if task.kind == "classification":
        return gold
    return np.add.reduceat(np.append(gold, False), part.token_start[:-1]) > 0
