"""Tokens under spans, against a comparison of every token with every span."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.support.arrays import covering_spans, covering_spans_of_texts


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
