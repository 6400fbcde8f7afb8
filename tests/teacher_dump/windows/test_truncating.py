"""Texts longer than the window have the tokens of transformers' truncation."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import SEGMENT
from teachonce.teacher_dump.windows.sequences import iter_truncated
from teachonce.teacher_dump.windows.window import Window
from tests.making.models import TOKENIZER_KINDS, Tokenizers
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.test_window import TEXTS, alone

PROMPT = "find: "


def window_of(text: str, tokenizer: Any, size: int, prompt: str = "") -> Window | None:
    found = list(iter_truncated([Document(text, "a.txt", 7)], tokenizer, size, prompt))
    return found[0] if found else None


def on_the(side: str, tokenizer: Any) -> Any:
    tokenizer = copy(tokenizer)
    tokenizer.truncation_side = side
    return tokenizer


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@given(text=TEXTS, size=st.integers(20, 60))
@settings(max_examples=60)
def test_a_text_is_cut_where_a_token_ends(
    make_tokenizer: Tokenizers, kind: str, side: str, text: str, size: int
) -> None:
    tokenizer, prompt = on_the(side, make_tokenizer(kind)), PROMPT if side == "right" else ""
    window = window_of(text, tokenizer, size, prompt)
    whole = alone(tokenizer, prompt + text)[0]
    if window is None:
        assert len(whole) == 2
        return
    assert (window.ids.tolist(), window.offsets.tolist()) == (
        (ids := alone(tokenizer, window.text)[0]),
        [list(span) for span in alone(tokenizer, window.text)[1]],
    )
    assert len(ids) <= size and (window.lost == 0) == (len(whole) <= size)
    if side == "right":
        assert (prompt + text).startswith(window.text) and window.document_begin == 0
        assert window.text.startswith(prompt)
        assert len(window.text[len(prompt) :].strip()) or not text.strip()
    else:
        assert text.endswith(window.text) and window.document_begin == window.lost


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("text", ["ACGT" * 30_000, "x " + "riverstory" * 90, "деревни" * 60])
def test_a_word_without_end_fills_the_window(
    make_tokenizer: Tokenizers, kind: str, text: str
) -> None:
    tokenizer = make_tokenizer(kind)
    window = window_of(text, tokenizer, 40, PROMPT)
    given = tokenizer(PROMPT + text, truncation=True, max_length=40)["input_ids"]
    assert window and window.ids.tolist() == given
    assert window.lost == len(PROMPT + text) - len(window.text)


def test_a_long_text_is_cut_on_the_left(make_tokenizer: Tokenizers) -> None:
    tokenizer, text = on_the("left", make_tokenizer("bpe")), " ".join(SENTENCES) * 60
    assert len(text) > SEGMENT
    window = window_of(text, tokenizer, 40)
    given = tokenizer(text, truncation=True, max_length=40)["input_ids"]
    assert window and window.ids.tolist() == given and window.document_begin == window.lost
    assert window.hard_cut == (text[window.lost - 1 : window.lost + 1].isalnum())


def test_characters_of_several_tokens_are_whole(make_tokenizer: Tokenizers) -> None:
    """A byte-level character of several tokens is never cut: all of its tokens have its span."""
    tokenizer = make_tokenizer("bpe")
    for size in range(10, 20):
        window = window_of("\U0001f9ac" * 20, tokenizer, size)
        assert window and size - 5 <= len(window.ids) <= size
        assert set(window.text) == {"\U0001f9ac"}
        starts = window.offsets[~window.special, 0]
        assert (np.diff(starts) >= 0).all() and (np.diff(starts) == 0).any()


def test_nothing_fits(make_tokenizer: Tokenizers) -> None:
    with pytest.raises(UserError, match=r"a.txt: no character of text 8 .* after the prompt 'f"):
        window_of("story " * 9, make_tokenizer("bpe"), 6, PROMPT)
    with pytest.raises(UserError, match=r"no character of text \d+ fits into the 2 tokens"):
        window_of("\U0001f9ac" * 9, make_tokenizer("bpe"), 4)
    counters = Counter[str]()
    given = [Document("\u200b", "a.txt", 0), Document("a", "a.txt", 1)]
    (window,) = iter_truncated(given, make_tokenizer("wordpiece"), 9, counters=counters)
    assert window.document == 1 and counters["no_tokens"] == 1
