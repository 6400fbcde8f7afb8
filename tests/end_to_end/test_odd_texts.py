"""Odd texts of every kind run through the whole pipeline: nothing crashes, no character is lost,
and all invariants hold."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teachonce.align import FlatText, Tokens, align_span
from tests.align.support import check_laws
from tests.integrity.odd_texts import KINDS, ODD, check_documents, odd_texts, run
from tests.teacher_dump.windows.cutting import cut_windows

Tokenizers = dict[str, Any]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.text(st.characters(), max_size=10),  # lone surrogates, too
        st.lists(st.sampled_from(ODD), max_size=12).map("".join),
    ),
    min_size=1,
    max_size=10,
)


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Callable[[str], Any]) -> Tokenizers:
    return {kind: make_tokenizer(kind) for kind in KINDS}


def test_generated_texts(tmp_path: Path, tokenizers: Tokenizers) -> None:
    texts = list(odd_texts(seed=1, count=300))
    counts = run(texts, tmp_path, tokenizers)
    assert counts["windows"] > len(texts) and counts["tokens"] > 10 * len(texts)


@pytest.mark.slow
@given(TEXTS, st.sampled_from(KINDS))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_texts(tokenizers: Tokenizers, texts: list[str], teacher: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(["a story", *texts], Path(folder), tokenizers, (teacher,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_a_huge_number_of_characters(tokenizers: Tokenizers, kind: str) -> None:
    word = "xé" * 100_000
    windows = cut_windows(word, tokenizers[kind], 512)
    assert "".join(window.text for window in windows) == word


def test_what_is_checked_does_find_things(tokenizers: Tokenizers) -> None:
    text = "The story of the lighthouse keeper. " * 30
    windows = cut_windows(text, tokenizers["bpe"], 48)
    check_documents([text], windows, tokenizers["bpe"])
    with pytest.raises(AssertionError):
        check_documents([text], windows[:2] + windows[3:], tokenizers["bpe"])
    encoding = tokenizers["bpe"].backend_tokenizer.encode(text)
    tokens = Tokens.of([encoding.ids], [encoding.offsets], [encoding.special_tokens_mask])
    flat = FlatText.of([text])
    found = align_span(flat, tokens, tokens)
    check_laws(flat, tokens, tokens, found)
    shifted = type(found)(found.teacher[:-1], found.student[1:])
    with pytest.raises(AssertionError):
        check_laws(flat, tokens, tokens, shifted)
    with pytest.raises(AssertionError):
        check_laws(flat, tokens, tokens, type(found)(found.teacher[::-1], found.student[::-1]))
    assert np.array_equal(found.teacher, found.student)
