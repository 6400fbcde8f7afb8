"""Pairs in the student's tokens: its tokenizer joins both texts, and each text is aligned
separately."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.align import FlatText, Tokens, align_span
from teachonce.store import StoreError
from teachonce.store.format.sequences import SEPARATOR
from teachonce.student_train.data.student_tokens import pair_types, tokenize
from tests.align.support import TEXT
from tests.making.models import Tokenizers

TEXTS = TEXT.map(lambda text: text.replace(SEPARATOR, " "))
KINDS = ("wordpiece", "bpe", "unigram")
BOTH = [(teacher, student) for teacher in KINDS for student in KINDS]


def sides(tokens: Tokens, texts: list[str]) -> Any:
    """Return the number of the text of each token; -1 for special tokens."""
    place = np.repeat([text.index(SEPARATOR) for text in texts], np.diff(tokens.start))
    return np.where(tokens.special, -1, tokens.offsets[:, 0] > place)


@pytest.mark.parametrize(("teacher", "student"), BOTH)
@settings(max_examples=25)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), size=st.integers(20, 200))
def test_runs_stay_within_a_text_of_a_pair(
    make_tokenizer: Tokenizers, teacher: str, student: str, pairs: list[tuple[str, str]], size: int
) -> None:
    texts = [SEPARATOR.join(pair) for pair in pairs]
    backend = copy.deepcopy(make_tokenizer(student).backend_tokenizer)
    backend.no_padding()
    backend.enable_truncation(size)
    own = tokenize(backend, texts, SEPARATOR)
    read = make_tokenizer(student)(
        [a for a, _ in pairs], [b for _, b in pairs], truncation=True, max_length=size,
        return_token_type_ids=True,
    )  # fmt: skip
    assert own.ids.tolist() == sum(read["input_ids"], [])
    assert own.types is not None and own.types.tolist() == sum(read["token_type_ids"], [])
    plain = copy.deepcopy(make_tokenizer(teacher).backend_tokenizer)
    plain.no_padding()
    plain.no_truncation()
    theirs = tokenize(plain, texts, SEPARATOR)
    found = align_span(FlatText.of(texts), theirs, own)
    ours, other = sides(own, texts), sides(theirs, texts)
    for taught, learnt in zip(found.teacher, found.student, strict=True):
        assert len({*other[slice(*taught)].tolist(), *ours[slice(*learnt)].tolist()}) == 1
    if teacher == student and len(own.ids) == len(theirs.ids):  # nothing is cut: all are paired
        paired = {n for run in found.student.tolist() for n in range(*run)}
        there = (own.offsets[:, 1] > own.offsets[:, 0]) & ~own.special
        assert paired >= set(np.flatnonzero(there).tolist())


@settings(max_examples=60)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_types_by_place_are_those_of_a_template_as_berts(
    make_tokenizer: Tokenizers, pairs: list[tuple[str, str]]
) -> None:
    texts = [SEPARATOR.join(pair) for pair in pairs]
    backend = copy.deepcopy(make_tokenizer("wordpiece").backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    tokens = tokenize(backend, texts, SEPARATOR)
    assert tokens.types is not None
    assert pair_types(tokens, texts, SEPARATOR).tolist() == tokens.types.tolist()


def test_a_text_that_is_no_pair(make_tokenizer: Tokenizers) -> None:
    backend = make_tokenizer("bpe").backend_tokenizer
    for text, times in (("one", 0), ("a\x1fb\x1fc", 2)):
        with pytest.raises(StoreError, match=f"occurs {times} times in .*, expected once"):
            tokenize(backend, ["a\x1fb", text], SEPARATOR)
