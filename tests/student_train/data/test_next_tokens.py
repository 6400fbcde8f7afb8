"""Which tokens of a student are trained on, against a search by characters."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.align import Alignment, Tokens
from teachonce.student_train.data.next_tokens import following, learnt_of_student, learnt_runs
from teachonce.student_train.data.student_tokens import IGNORED
from teachonce.support.arrays import Array, starts

CUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4)


def tokens_of(texts: list[list[int]]) -> Tokens:
    """Tokens of these numbers of characters, a special one in front of each text."""
    spans = [[(0, 0), *zip(starts(sizes)[:-1], starts(sizes)[1:], strict=True)] for sizes in texts]
    flat = np.array([span for text in spans for span in text], np.int32)
    special = np.array([not place for text in spans for place in range(len(text))])
    return Tokens(np.arange(len(flat)), flat, special, starts([len(text) for text in spans]))


def split_again(sizes: list[int], rng: np.random.Generator) -> list[int]:
    """Cut a text of as many characters at other places."""
    total = sum(sizes)
    inner = np.flatnonzero(rng.random(total - 1) < 0.5) + 1
    return [int(size) for size in np.diff([0, *inner.tolist(), total])]


def learnt_by_characters(learnt: Array, teacher: Tokens, student: Tokens) -> list[bool]:
    found = []
    for text in range(len(teacher.start) - 1):
        own = range(teacher.start[text], teacher.start[text + 1])
        out = {c for i in own if not learnt[i] for c in range(*teacher.offsets[i].tolist())}
        for i in range(student.start[text], student.start[text + 1]):
            found.append(out.isdisjoint(range(*student.offsets[i].tolist())))
    return found


@settings(max_examples=100)
@given(texts=CUTS, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.4, 0.8, 1.0]))
def test_the_learnt_tokens_of_a_student(texts: list[list[int]], seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    teacher = tokens_of(texts)
    student = tokens_of([split_again(sizes, rng) for sizes in texts])
    learnt = rng.random(len(teacher.ids)) < share
    found = learnt_of_student(learnt, teacher, student)
    assert found.tolist() == learnt_by_characters(learnt, teacher, student)
    read = following(student, found)
    expected = following(student).labels.copy()
    expected[[i for i in range(len(found) - 1) if not found[i + 1]]] = IGNORED
    assert np.array_equal(read.labels, expected) and read.learnt is not None
    runs = np.array([(i, i + 2) for i in range(0, len(student.ids) - 1, 2)], np.int32)
    chosen = learnt_runs(Alignment(runs, runs), found)
    assert chosen.student.tolist() == [run for run in runs.tolist() if found[slice(*run)].all()]
