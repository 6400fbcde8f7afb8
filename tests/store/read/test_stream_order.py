"""The order of a stream is a pure function of its blocks, seed and epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.store.read import stream_order
from teachonce.store.read.part_index import block_starts
from teachonce.support.arrays import Array, permutation, starts

law = settings(max_examples=60, deadline=None)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=80).map(np.array)


@law
@given(lengths, st.integers(1, 120), st.integers(0, 5), st.integers(0, 3))
def test_batches_hold_each_sequence_once_within_the_budget(
    sizes: Array, budget: int, seed: int, epoch: int
) -> None:
    for batches in (
        stream_order.shuffled_batches(sizes, budget, seed, epoch, 0),
        stream_order.plain_batches(sizes, budget),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
        for batch in batches:
            assert len(batch) == 1 or sizes[batch].max() * len(batch) <= budget
    plain = stream_order.plain_batches(sizes, budget)
    assert np.concatenate(plain).tolist() == list(range(len(sizes)))


@law
@given(lengths, st.integers(1, 30), st.integers(0, 5))
def test_batches_counted_in_texts_are_full_but_for_one(sizes: Array, texts: int, seed: int) -> None:
    for batches in (
        stream_order.shuffled_batches(sizes, 1, seed, 0, 0, texts),
        stream_order.plain_batches(sizes, 1, texts),
    ):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
        counts = sorted(map(len, batches), reverse=True)
        assert counts[:-1] == [texts] * (len(counts) - 1) and 0 < counts[-1] <= texts


@law
@given(lengths, st.integers(1, 60), st.sets(st.integers(0, 200)))
def test_blocks_are_runs_of_about_their_size(sizes: Array, tokens: int, firsts: set[int]) -> None:
    start = starts(sizes)
    parts = np.array([0, *sorted(first for first in firsts if 0 < first < len(sizes))])
    begin = block_starts(sizes, parts, tokens)
    assert set(parts.tolist()) <= set(begin.tolist())
    for first, last in zip(parts, [*parts[1:], len(sizes)], strict=True):
        alone = block_starts(sizes[first:last], np.zeros(1, int), tokens)
        assert (alone + first).tolist() == [at for at in begin if first <= at < last]
    blocks = np.stack([begin, np.append(begin[1:], len(sizes))], axis=1)
    assert (blocks[:, 0] < blocks[:, 1]).all()
    assert blocks[0, 0] == 0 and blocks[-1, 1] == len(sizes)
    assert (blocks[1:, 0] == blocks[:-1, 1]).all()
    assert ((start[blocks[:, 1]] - start[blocks[:, 0]]) < tokens + sizes.max()).all()


@law
@given(st.lists(st.integers(0, 30), min_size=1, max_size=100), st.integers(0, 5))
def test_block_order_is_a_permutation_of_few_parts_at_a_time(parts: list[int], seed: int) -> None:
    numbers = np.array(sorted(parts))
    ordered = stream_order.order_blocks(numbers, seed, 0)
    assert sorted(ordered.tolist()) == list(range(len(parts)))
    groups = numbers[ordered]
    first = {part: int(np.flatnonzero(groups == part)[0]) for part in set(parts)}
    last = {part: int(np.flatnonzero(groups == part)[-1]) for part in set(parts)}
    for place in range(len(groups)):
        open_parts = sum(first[p] <= place <= last[p] for p in first)
        assert open_parts <= stream_order.PARTS_TOGETHER


def test_seed_and_epoch_change_the_order_and_nothing_else_does() -> None:
    parts = np.repeat(np.arange(10), 6)
    orders = {
        (s, e): stream_order.order_blocks(parts, s, e).tolist() for s in (0, 1) for e in (0, 1)
    }
    assert len({str(value) for value in orders.values()}) == 4
    assert orders[1, 1] == stream_order.order_blocks(parts, 1, 1).tolist()


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    """The order of a seed never changes. If this fails, stopped runs cannot be continued: do not
    change the numbers."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    parts = np.repeat(np.arange(3), 3)
    assert stream_order.order_blocks(parts, 7, 0).tolist() == BLOCKS


PERMUTATION = [5, 6, 3, 2, 1, 0, 4, 7]
BLOCKS = [5, 1, 2, 7, 6, 4, 0, 8, 3]
