"""Windows: nothing lost, nothing too long, of texts and of pairs, packed and unpacked.

- Windows: nothing lost, nothing too long, and every text gives its tokens when tokenized alone.
- Windows of a part are passed to another process as bytes, and come back unchanged.
- Windows of pairs contain both texts in one sequence, the longer one truncated first.
- Texts longer than the window have the tokens of transformers' truncation.
"""

from collections import Counter
from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from teachonce.store.format.sequences import SEPARATOR
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.corpus.labelled_text import Gold
from teachonce.teacher_dump.windows.cutting import SEGMENT, iter_windows
from teachonce.teacher_dump.windows.masked_views import maskable_spans
from teachonce.teacher_dump.windows.sequences import iter_pairs, iter_parallel, iter_truncated
from teachonce.teacher_dump.windows.window import Unreadable, Window, is_whole, packed, unpacked
from tests.align.support import TEXT
from tests.making.models import TOKENIZER_KINDS, Tokenizers
from tests.making.texts import ENGLISH, RUSSIAN, SENTENCES
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
    words = maskable_spans(text)
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


def documents(*texts: str) -> list[Document]:
    return [Document(text, "here", number) for number, text in enumerate(texts)]


def check(windows: list[Window]) -> None:
    data = packed(7, windows)
    assert data == packed(7, windows)
    first, found = unpacked(data)
    assert first == 7 and len(found) == len(windows)
    for one, other in zip(windows, found, strict=True):
        for name in ("text", "document", "document_begin", "hard_cut"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("ids", "offsets", "special", "numbers", "types", "read"):
            before, after = getattr(one, name), getattr(other, name)
            assert (before is None) == (after is None)
            if before is not None:
                assert before.dtype == after.dtype and np.array_equal(before, after)


def test_windows_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [" ".join(ENGLISH[:20]), "a\U0001f600\u00e9 " + RUSSIAN[0], "x"]
    check(list(iter_windows(documents(*texts), make_tokenizer("wordpiece"), 16)))


def test_windows_of_pairs_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [SEPARATOR.join(ENGLISH[i : i + 2]) for i in range(3)]
    pairs = iter_pairs(documents(*texts), make_tokenizer("wordpiece"), 32, SEPARATOR)
    check(list(pairs))


def test_windows_of_parallel_texts_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [SEPARATOR.join(pair) for pair in zip(ENGLISH, RUSSIAN[:3], strict=False)]
    windows = list(iter_parallel(documents(*texts), make_tokenizer("wordpiece"), 32, "find: "))
    assert len(windows) == 3 and all(window.read is not None for window in windows)
    check(windows)


def test_torn_bytes_are_found(make_tokenizer: Tokenizers) -> None:
    data = packed(0, list(iter_windows(documents(*ENGLISH[:5]), make_tokenizer("wordpiece"), 32)))
    assert is_whole(data)
    listed = data.rindex(b"PK\x01\x02")  # for the last member: flags at 8, compression at 10
    flipped = [bytearray(data) for _ in range(3)]
    for each, place in zip(flipped, (len(data) // 2, listed + 8, listed + 10), strict=True):
        each[place] ^= 1
    for bad in (b"", data[:100], data[:-30], *map(bytes, flipped)):
        assert not is_whole(bad)
        with pytest.raises(Unreadable):
            unpacked(bad)


HALVES = TEXT.map(lambda text: text.replace(SEPARATOR, " "))


def windows_of(tokenizer: Any, size: int, *pairs: tuple[str, str], **counted: Any) -> list[Window]:
    documents = [Document(SEPARATOR.join(pair), "x", n) for n, pair in enumerate(pairs)]
    return list(iter_pairs(documents, tokenizer, size, SEPARATOR, **counted))


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@settings(max_examples=60)
@given(pair=st.tuples(HALVES, HALVES), size=st.integers(24, 64))
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


def test_refusals_of_pairs(make_tokenizer: Tokenizers) -> None:
    with pytest.raises(UserError, match=r"puts no token between the two texts.*one column"):
        windows_of(make_tokenizer("bpe-plain"), 32, ("a", "b"))
    with pytest.raises(UserError, match=r"--max-length 4: expected at least 5 \(3 special"):
        windows_of(make_tokenizer("bpe"), 4, ("a", "b"))


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
