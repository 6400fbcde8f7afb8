"""Measures of rankings equal numbers computed by hand; search equals a plain sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachonce.downstream.search.measures import agreement, judged
from teachonce.downstream.search.rankings import nearest


def test_grades_count_as_gains() -> None:
    """Grades 1, 0, 2 give DCG 1 + 2/2 with the ideal 2 + 1/log2(3). A query without results counts,
    and so does a judged document that no model can find."""
    judgements = {"1": {"a": 2, "b": 1, "c": 0}, "2": {"x": 1, "gone": 1}}
    found = judged(judgements, {"1": ["b", "c", "a"], "2": ["y"]})
    assert found["ndcg_10"] == pytest.approx((2 / (2 + 1 / math.log2(3)) + 0) / 2)
    assert found["mrr_10"] == pytest.approx(0.5)
    assert found["recall_100"] == pytest.approx(0.5)


def test_the_cuts_are_where_their_names_say() -> None:
    """A result at rank 11 counts for recall only, and a result at rank 101 does not count."""
    others = [f"d{number}" for number in range(100)]
    for place, expected in ((9, 1 / 10), (10, 0.0)):
        ranking = [*others[:place], "x", *others[place:]]
        found = judged({"q": {"x": 1}}, {"q": ranking})
        assert found["mrr_10"] == pytest.approx(expected)
        assert found["ndcg_10"] == pytest.approx(expected and 1 / math.log2(11))
        assert found["recall_100"] == 1
    assert judged({"q": {"x": 1}}, {"q": [*others, "x"]})["recall_100"] == 0


def test_a_query_without_a_ranking_counts_as_nothing_found() -> None:
    assert judged({"1": {"a": 1}, "2": {"a": 1}}, {"1": ["a"]})["ndcg_10"] == 0.5


def test_agreement_sees_members_and_order() -> None:
    names = [f"d{number}" for number in range(14)]
    teacher = {"q": names}
    assert agreement(teacher, {"q": names}) == pytest.approx(
        {"teacher_ndcg_10": 1, "overlap_10": 1}
    )
    swapped = [names[1], names[0], *names[2:]]
    ideal = sum((10 - place) / math.log2(place + 2) for place in range(10))
    lost = 1 - 1 / math.log2(3)  # of grade 10 against 9, in the first place against the second
    found = agreement(teacher, {"q": swapped})
    assert found["teacher_ndcg_10"] == pytest.approx(1 - lost / ideal)
    assert found["overlap_10"] == 1
    assert agreement(teacher, {"q": names[9:]})["overlap_10"] == pytest.approx(0.1)
    few = {"q": names[:4]}
    assert agreement(few, few) == pytest.approx({"teacher_ndcg_10": 1, "overlap_10": 1})


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(1, 9),
)
def test_blocks_change_nothing(seed: int, queries: int, sizes: list[int], depth: int) -> None:
    """Small whole numbers, so that many documents are equally near."""
    draws = np.random.default_rng(seed)
    asked = draws.integers(-2, 3, (queries, 3)).astype(np.float32)
    blocks = [draws.integers(-2, 3, (size, 3)).astype(np.float32) for size in sizes]
    found, places = nearest(asked, blocks, depth)
    whole = np.concatenate([np.zeros((0, 3), np.float32), *blocks])
    scores = asked @ whole.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
    assert np.array_equal(places, order)
    assert np.array_equal(found, np.take_along_axis(scores, order, 1))
