"""Windows: nothing lost, nothing too long, and every text gives its tokens when tokenized alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import SEGMENT, iter_windows
from teachonce.teacher_dump.windows.masked_views import word_spans
from teachonce.teacher_dump.windows.window import Window
from tests.making.models import TOKENIZER_KINDS, Tokenizers
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.cutting import cut_windows

LAWS = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
WORDS = st.one_of(
    st.sampled_from(" ".join(SENTENCES).split()),
    st.sampled_from(
        ["  ", "\t", "。", "日本", "e\u0301\u0323", "👩‍👩‍👧‍👦", "[SEP]", "<s>", "don't", "x" * 40]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
TEXTS = st.builds(
    lambda words, glue: glue.join(words),
    st.lists(WORDS, max_size=60),
    st.sampled_from([" ", "", " \n"]),
)


def alone(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids and offsets from transformers' own call."""
    found = tokenizer(text, return_offsets_mapping=True)
    return found["input_ids"], found["offset_mapping"]


def assert_window(window: Window, tokenizer: Any, max_length: int, text: str) -> None:
    ids, offsets = alone(tokenizer, window.text)
    assert window.ids.tolist() == ids
    assert window.offsets.tolist() == [list(span) for span in offsets]
    assert len(ids) <= max_length
    assert window.special.tolist() == [True] + [False] * (len(ids) - 2) + [True]
    assert not window.offsets[window.special].any()
    begin, end = window.offsets.T
    assert (begin <= end).all() and end.max() <= len(window.text)
    assert text[window.document_begin :].startswith(window.text)
    words = word_spans(text)
    inside = (words[:, 0] < window.document_begin) & (window.document_begin < words[:, 1])
    assert window.hard_cut == inside.any()


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@given(text=TEXTS, max_length=st.integers(16, 60))
@example(text=f"¢\x0c0_{'x' * 40}", max_length=16)
@LAWS
def test_windows_without_stride_are_the_document(
    make_tokenizer: Tokenizers, kind: str, text: str, max_length: int
) -> None:
    tokenizer = make_tokenizer(kind)
    windows = cut_windows(text, tokenizer, max_length, 0)
    if len(alone(tokenizer, text)[0]) == 2:
        assert windows == []
        return
    place = 0
    for begin, size in [
        *((each.document_begin, len(each.text)) for each in windows),
        (len(text), 0),
    ]:
        # Text without tokens, such as a control character that BERT deletes, has no window.
        assert begin == place or len(alone(tokenizer, text[place:begin])[0]) == 2
        place = begin + size
    for window in windows:
        assert_window(window, tokenizer, max_length, text)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@given(text=TEXTS, stride=st.integers(1, 30))
@LAWS
def test_windows_with_stride_overlap_and_leave_no_gap(
    make_tokenizer: Tokenizers, kind: str, text: str, stride: int
) -> None:
    tokenizer = make_tokenizer(kind)
    windows = cut_windows(text, tokenizer, 48, stride)
    covered = 0
    for window in windows:
        assert_window(window, tokenizer, 48, text)
        assert window.document_begin <= covered < window.document_begin + len(window.text)
        covered = window.document_begin + len(window.text)
    assert covered == (len(text) if windows else 0)


def test_overlap_is_the_stride_in_whole_words(make_tokenizer: Tokenizers) -> None:
    text = " ".join(SENTENCES[:12] * 3)
    for kind in TOKENIZER_KINDS:
        windows = cut_windows(text, make_tokenizer(kind), 64, 16)
        overlaps = []
        for before, after in zip(windows, windows[1:], strict=False):
            shared = before.document_begin + len(before.text) - after.document_begin
            starts = before.offsets[~before.special, 0]
            overlaps.append(int((starts >= len(before.text) - shared).sum()))
            assert not after.hard_cut
            assert after.text[0] == " "
        assert max(overlaps) <= 16
        assert np.mean(overlaps) > 11


def test_tokens_at_random_are_refused(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("bpe")
    tokenizer.backend_tokenizer.model.dropout = 0.1
    with pytest.raises(UserError, match="drops 10% of its merges at random.*model.dropout"):
        cut_windows("a story", tokenizer, 48, 0)


def test_windows_are_filled(make_tokenizer: Tokenizers) -> None:
    text = " ".join(SENTENCES[:20] * 5)
    for kind in TOKENIZER_KINDS:
        windows = cut_windows(text, make_tokenizer(kind), 64, 0)
        assert np.mean([len(window.ids) for window in windows[:-1]]) > 58


def test_cuts_are_made_before_blanks_and_cjk_characters(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("wordpiece")
    english = cut_windows(" ".join(SENTENCES[:5]), tokenizer, 16, 0)
    assert len(english) > 5
    assert all(window.text[0] == " " for window in english[1:])
    chinese = cut_windows("老灯塔看守人每天晚上爬上楼梯点灯" * 4, tokenizer, 16, 0)
    assert len(chinese) >= 4
    assert not any(window.hard_cut for window in chinese)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_long_word_is_cut_hard_but_no_mark_is_torn_off(
    make_tokenizer: Tokenizers, kind: str
) -> None:
    word = "e\u0301\u0323x" * 24
    windows = cut_windows(f"so {word} it", make_tokenizer(kind), 20, 0)
    assert "".join(window.text for window in windows) == f"so {word} it"
    assert any(window.hard_cut for window in windows)
    assert not any(window.text[0] in "\u0301\u0323" for window in windows)


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
@pytest.mark.parametrize("stride", [0, 8])
def test_document_longer_than_a_segment(make_tokenizer: Tokenizers, kind: str, stride: int) -> None:
    text = "\n".join(SENTENCES * 30)
    assert len(text) > 1.5 * SEGMENT
    tokenizer = make_tokenizer(kind)
    windows = cut_windows(text, tokenizer, 128, stride)
    covered = 0
    for window in windows:
        assert len(window.ids) <= 128
        assert window.document_begin <= covered
        assert text.startswith(window.text, window.document_begin)
        covered = window.document_begin + len(window.text)
    assert covered == len(text)
    for window in windows[::50]:
        assert window.ids.tolist() == alone(tokenizer, window.text)[0]


def test_one_unknown_word_longer_than_a_segment(make_tokenizer: Tokenizers) -> None:
    text = "a " + "b" * (3 * SEGMENT) + " " + "c " * 100
    windows = cut_windows(text, make_tokenizer("wordpiece"), 64, 0)
    assert "".join(window.text for window in windows) == text
    assert not any(window.hard_cut for window in windows)


def test_every_window_too_long_at_first_is_cut_again(make_tokenizer: Tokenizers) -> None:
    # letters that merge differently from every start
    text = "".join(np.random.default_rng(0).choice(list("theriansto"), 4000))
    for kind in TOKENIZER_KINDS:
        windows = cut_windows(text, make_tokenizer(kind), 32, 0)
        assert "".join(window.text for window in windows) == text
        assert max(len(window.ids) for window in windows) <= 32


def test_documents_keep_their_order_and_number(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("bpe")
    texts = [" ".join(SENTENCES) if i % 7 == 3 else SENTENCES[i % 49] for i in range(2100)]
    documents = [Document(text, "x", 2 * i) for i, text in enumerate(texts)]
    joined = [""] * len(texts)
    last = 0
    for window in iter_windows(iter(documents), tokenizer, 64):
        assert window.document >= last
        last = window.document
        assert window.document_begin == len(joined[last // 2])
        joined[last // 2] += window.text
    assert joined == texts


def test_text_without_tokens_is_left_out_and_counted(make_tokenizer: Tokenizers) -> None:
    counters = Counter[str]()
    texts = ["\x00\x01", "a b", "\u200b\x02"]
    documents = [Document(text, "x", i) for i, text in enumerate(texts)]
    windows = list(iter_windows(documents, make_tokenizer("wordpiece"), 16, 0, counters))
    assert [window.document for window in windows] == [1]
    assert counters["no_tokens"] == 2


def test_lone_surrogates_are_replaced_and_counted(make_tokenizer: Tokenizers) -> None:
    counters = Counter[str]()
    documents = [Document("a \ud83d b\udc00", "x", 0)]
    (window,) = iter_windows(documents, make_tokenizer("bpe"), 64, 0, counters)
    assert window.text == "a \ufffd b\ufffd"
    assert counters["surrogates"] == 2


def test_truncation_and_padding_of_the_tokenizer_do_not_matter(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("wordpiece")
    text = " ".join(SENTENCES[:5])
    expected = [window.text for window in cut_windows(text, tokenizer, 32, 0)]
    tokenizer(text, truncation=True, max_length=8, padding="max_length")
    assert [window.text for window in cut_windows(text, tokenizer, 32, 0)] == expected


def test_refusals(make_tokenizer: Tokenizers) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = make_tokenizer("bpe")
    with pytest.raises(UserError, match=r"ByT5Tokenizer: is a slow tokenizer.*tokenizer\.json"):
        iter_windows([], ByT5Tokenizer(), 32)
    with pytest.raises(UserError, match=r"--max-length 3: expected at least 4"):
        iter_windows([], tokenizer, 3)
    for stride in (-1, 30):
        with pytest.raises(UserError, match=rf"--stride {stride}: expected 0 to 29"):
            iter_windows([], tokenizer, 32, stride)
    with pytest.raises(
        UserError, match=r"--max-length 5: the character '\\U00013000' alone gives 6"
    ):
        cut_windows("a \U00013000 b", tokenizer, 5, 0)
