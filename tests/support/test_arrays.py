"""Flat arrays of ragged rows, against lists."""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.support.arrays import begins, ranges, starts

law = settings(max_examples=100, deadline=None)
sizes = st.lists(st.integers(0, 9), max_size=20)


@law
@given(sizes, st.sampled_from(["uint8", "int32", "int64", "bool"]))
def test_starts_and_begins(each: list[int], dtype: str) -> None:
    array = np.array(each).astype(dtype)
    expected = list(accumulate(array.tolist(), initial=0))
    for either in (array, array.tolist()):
        start = starts(either)
        assert start.dtype == np.int64 and start.tolist() == expected
        assert begins(either).tolist() == expected[:-1]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16"])
def test_sums_beyond_the_type_of_the_sizes(dtype: str) -> None:
    assert starts(np.full(5000, 200, dtype))[-1] == 1_000_000


@law
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=20))
def test_ranges(rows: list[tuple[int, int]]) -> None:
    begin, size = np.array(rows, int).reshape(-1, 2).T
    expected = chain.from_iterable(range(first, first + count) for first, count in rows)
    assert ranges(begin, size).tolist() == list(expected)
