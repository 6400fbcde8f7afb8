"""Windows of pairs contain both texts in one sequence, the longer one truncated first."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.store import UserError
from teachonce.store.format.sequences import SEPARATOR
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.corpus.labelled_text import Gold
from teachonce.teacher_dump.windows.cutting import SEGMENT
from teachonce.teacher_dump.windows.sequences import iter_pairs
from teachonce.teacher_dump.windows.window import Window
from tests.align.support import TEXT
from tests.making.models import Tokenizers
from tests.making.texts import SENTENCES

TEXTS = TEXT.map(lambda text: text.replace(SEPARATOR, " "))


def windows_of(tokenizer: Any, size: int, *pairs: tuple[str, str], **counted: Any) -> list[Window]:
    documents = [Document(SEPARATOR.join(pair), "x", n) for n, pair in enumerate(pairs)]
    return list(iter_pairs(documents, tokenizer, size, SEPARATOR, **counted))


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@settings(max_examples=60)
@given(pair=st.tuples(TEXTS, TEXTS), size=st.integers(24, 64))
def test_a_window_is_the_pair_as_the_tokenizer_reads_it(
    make_tokenizer: Tokenizers, kind: str, pair: tuple[str, str], size: int
) -> None:
    tokenizer, counters = make_tokenizer(kind), Counter[str]()
    backend = tokenizer.backend_tokenizer
    found = windows_of(tokenizer, size, pair, counters=counters)
    whole = backend.encode(*pair)
    if all(whole.special_tokens_mask):
        assert not found and counters["no_tokens"] == 1
        return
    (window,) = found
    texts = window.text.split(SEPARATOR)
    assert len(texts) == 2 and all(a.startswith(b) for a, b in zip(pair, texts, strict=True))
    assert (texts == list(pair)) == (len(whole) <= size) == (window.lost == 0)
    want = backend.encode(*texts)
    assert window.types is not None and len(window.ids) <= size
    assert window.ids.tolist() == want.ids and window.types.tolist() == want.type_ids
    for (begin, end), number, local in zip(
        window.offsets.tolist(), want.sequence_ids, want.offsets, strict=True
    ):
        if number is None:
            assert (begin, end) == (0, 0)
        else:
            shift = number * (len(texts[0]) + 1)
            assert (begin - shift, end - shift) == local


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_longer_text_is_cut_first(make_tokenizer: Tokenizers, kind: str) -> None:
    tokenizer, long, short = make_tokenizer(kind), " ".join(SENTENCES) * 9, SENTENCES[1][:30]
    far = "story " * (SEGMENT // 2)
    pairs = ((long, short), (short, long), (long, far), (short, short), (far, ""))
    found = windows_of(tokenizer, 64, *pairs)
    assert sum(window.lost > 0 for window in found) == 4
    halves = [window.text.split(SEPARATOR) for window in found]
    assert halves[0][1] == halves[1][0] == short and halves[3] == [short, short]
    assert halves[4][1] == "" and len(halves[4][0]) > len(halves[2][1])
    for window, (first, _) in zip(found, halves, strict=True):
        assert len(window.ids) == 64 or first == short
    sizes = [np.bincount(found[2].offsets[~found[2].special, 0] > len(halves[2][0]), minlength=2)]
    assert abs(np.diff(sizes[0])[0]) <= 1


def test_a_pair_keeps_its_number_and_its_label(make_tokenizer: Tokenizers) -> None:
    texts = [f"{a}{SEPARATOR}{b}" for a, b in zip(SENTENCES, SENTENCES[1:], strict=False)] * 60
    documents = [Document(t, "x", 3 * n, Gold(str(n))) for n, t in enumerate(texts)]
    found = list(iter_pairs(documents, make_tokenizer("bpe"), 512, SEPARATOR))
    assert [w.document for w in found] == [3 * n for n in range(len(texts))]
    assert [w.gold and w.gold.label for w in found] == [str(n) for n in range(len(texts))]
    assert [w.text for w in found] == texts and not any(w.document_begin for w in found)


def test_a_pair_that_is_cut_on_the_left_begins_where_its_first_text_does(
    make_tokenizer: Tokenizers,
) -> None:
    tokenizer, long, short = copy(make_tokenizer("bpe")), " ".join(SENTENCES), SENTENCES[1][:30]
    tokenizer.truncation_side = "left"
    first, second = windows_of(tokenizer, 40, (long, short), (short, long))
    assert first.lost and SEPARATOR.join((long, short))[first.document_begin :] == first.text
    assert first.document_begin == first.lost
    assert first.hard_cut == long[first.lost - 1 : first.lost + 1].isalnum()
    assert second.lost and second.text.startswith(short)
    assert second.document_begin == 0 and not second.hard_cut


def test_refusals(make_tokenizer: Tokenizers) -> None:
    with pytest.raises(UserError, match=r"puts no token between the two texts.*one column"):
        windows_of(make_tokenizer("bpe-plain"), 32, ("a", "b"))
    with pytest.raises(UserError, match=r"--max-length 4: expected at least 5 \(3 special"):
        windows_of(make_tokenizer("bpe"), 4, ("a", "b"))
