"""Flat arrays of ragged rows, and tokens under spans.

- Flat arrays of ragged rows, against lists.
- Tokens under spans, against a comparison of every token with every span.
"""

from itertools import accumulate, chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.support.arrays import begins, covering_spans, covering_spans_of_texts, ranges, starts

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


def test_tokens_that_share_a_character_with_a_span() -> None:
    begin, end = np.array([0, 0, 3, 5, 9, 0]), np.array([0, 3, 5, 9, 12, 0])
    found = covering_spans(begin, end, np.array([4, 11]), np.array([5, 12]))
    assert found.tolist() == [-1, -1, 0, -1, 1, -1]
    assert (covering_spans(begin, end, np.array([], int), np.array([], int)) == -1).all()


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Draw tokens, which may overlap, and ascending disjoint spans of one text."""
    ends = st.tuples(st.integers(0, 30), st.integers(0, 30))
    tokens = [(min(pair), max(pair)) for pair in draw(st.lists(ends, max_size=8))]
    edges = sorted(draw(st.sets(st.integers(0, 30), max_size=8)))
    return tokens, list(zip(edges[::2], edges[1::2], strict=False))


def first_covering(token: tuple[int, int], spans: list[tuple[int, int]]) -> int:
    shared = [max(token[0], begin) < min(token[1], end) for begin, end in spans]
    return shared.index(True) if True in shared else -1


@settings(max_examples=100)
@given(st.lists(texts(), max_size=5))
def test_texts_at_once_are_each_text_alone(
    given: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]],
) -> None:
    expected, tokens, spans = list[int](), list[tuple[int, int]](), list[tuple[int, int]]()
    for its_tokens, its_spans in given:
        alone = [first_covering(token, its_spans) for token in its_tokens]
        pairs = np.array(its_tokens, np.int32).reshape(-1, 2)
        under = np.array(its_spans, np.int32).reshape(-1, 2)
        assert covering_spans(*pairs.T, *under.T).tolist() == alone
        expected += [number + len(spans) if number >= 0 else -1 for number in alone]
        tokens, spans = tokens + its_tokens, spans + its_spans
    found = covering_spans_of_texts(
        np.array(tokens, np.int32).reshape(-1, 2),
        np.array([len(its) for its, _ in given], int),
        np.array(spans, np.int32).reshape(-1, 2),
        np.array([len(its) for _, its in given], int),
    )
    assert found.tolist() == expected
