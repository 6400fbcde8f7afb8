"""Masked views: the words, the draws, the teacher's input, and rare words.

- Masked views: the words, the draws, and the teacher's input.
- Words are counted in the corpus; rare words are masked more often, equally for every teacher.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.store import open_store
from teachonce.store.extras.word_counts import WordCounts
from teachonce.support.arrays import Array
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.windows import masked_views
from teachonce.teacher_dump.windows.masked_views import (
    KEEP,
    MASK,
    RANDOM,
    DrawKey,
    MaskVocabulary,
    mask_spans,
    maskable_spans,
    maskable_words,
    masked_input,
)
from tests.making.dumps import dumped, write_corpus
from tests.making.models import TOKENIZER_KINDS, Teachers, Tokenizers
from tests.making.texts import ENGLISH, SENTENCES
from tests.teacher_dump.windows.cutting import cut_windows

LAWS = settings(max_examples=100, deadline=None)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't stop, x_y 1,204", ["don't", "stop", ",", "x_y", "1", ",", "204"]),
        ("“Don’t”", ["“", "Don’t", "”"]),
        ("日本のABC漢", ["日", "本", "の", "ABC", "漢"]),
        ("e\u0301te\u0301 x\u0323", ["e\u0301te\u0301", "x\u0323"]),
        ("👩‍👩‍👧‍👦👍🏽🇸🇰❤️", ["👩‍👩‍👧‍👦", "👍🏽", "🇸🇰", "❤️"]),
        ("दीपस्तंभ का", ["दीपस्तंभ", "का"]),
        ("co\u00adop zero\u200bwidth \x00a", ["co\u00adop", "zero", "width", "a"]),
        (" \t\n\u3000", []),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    spans = maskable_spans(text)
    assert spans.dtype == np.int32 and spans.shape == (len(words), 2)
    assert [text[begin:end] for begin, end in spans] == words


@given(TEXTS)
@LAWS
def test_words_ascend_and_hold_every_letter(text: str) -> None:
    spans = maskable_spans(text)
    flat = spans.reshape(-1)
    assert (np.diff(flat) >= 0).all() and (spans[:, 0] < spans[:, 1]).all()
    inside = np.zeros(len(text), bool)
    for begin, end in spans:
        inside[begin:end] = True
    for character, held in zip(text, inside, strict=True):
        assert held or not character.isalnum()
        assert not (held and character.isspace())


@given(TEXTS, st.integers(-(2**63), 2**64), st.integers(1, 9), st.integers(0, 2**40))
@LAWS
def test_masked_words_are_words_and_a_pure_function(
    text: str, seed: int, view: int, sequence: int
) -> None:
    spans = mask_spans(text, seed, view, sequence)
    words = {tuple(word) for word in maskable_spans(text).tolist()}
    assert spans.dtype == np.int32 and spans.shape[1] == 3
    assert {tuple(span[:2]) for span in spans.tolist()} <= words
    assert (np.diff(spans[:, 0]) > 0).all()
    assert np.isin(spans[:, 2], (MASK, RANDOM, KEEP)).all()
    assert bool(len(spans)) == bool(words)
    np.testing.assert_array_equal(spans, mask_spans(text, seed, view, sequence))


def test_probability_and_actions() -> None:
    text = "word " * 31
    spans = [mask_spans(text, 7, 1, sequence, 0.15) for sequence in range(2000)]
    assert {len(found) for found in spans} == {4, 5}
    assert np.mean([len(found) for found in spans]) == pytest.approx(0.15 * 31, abs=0.05)
    actions = np.bincount(np.concatenate(spans)[:, 2], minlength=3) / sum(map(len, spans))
    np.testing.assert_allclose(actions, (0.8, 0.1, 0.1), atol=0.015)
    positions = np.bincount(np.concatenate(spans)[:, 0] // 5, minlength=31) / len(spans)
    np.testing.assert_allclose(positions, 0.15, atol=0.03)


@given(TEXTS, st.dictionaries(TEXTS, st.integers(2, 2**40)), st.floats(0.01, 0.99))
@LAWS
def test_counts_change_which_words_are_masked_but_not_how_many(
    text: str, counts: dict[str, int], probability: float
) -> None:
    key, words = (3, 1, 4), maskable_words(text)
    assert words == [text[begin:end] for begin, end in maskable_spans(text)]
    known = dict(zip(words, counts.values(), strict=False))
    plain = mask_spans(text, *key, probability)
    assert len(mask_spans(text, *key, probability, WordCounts(known))) == len(plain)
    for alike in ({}, dict.fromkeys(words, 70)):
        drawn = mask_spans(text, *key, probability, WordCounts(alike))
        np.testing.assert_array_equal(drawn, plain)


def times_masked(counts: dict[str, int], probability: float, trials: int) -> Array:
    text, known = " ".join(counts), WordCounts(counts)
    drawn = [mask_spans(text, 5, 1, sequence, probability, known) for sequence in range(trials)]
    begins = maskable_spans(text)[:, 0]
    return np.bincount(np.searchsorted(begins, np.concatenate(drawn)[:, 0]), minlength=len(counts))


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6))
@settings(max_examples=10, deadline=None)
def test_one_word_is_drawn_by_its_count_to_the_power_of_minus_seven_tenths(
    counts: list[int],
) -> None:
    times = times_masked({f"w{i}": count for i, count in enumerate(counts)}, 0.001, 1000)
    weights = np.array(counts) ** -0.7
    expected = 1000 * weights / weights.sum()
    assert times.sum() == 1000
    assert (np.abs(times - expected) <= 6 * np.sqrt(expected) + 6).all(), (times, expected)


def test_a_word_is_masked_no_more_often_than_always() -> None:
    counts = {"rare": 1, "seldom": 2} | {f"common{i}": 10**12 for i in range(8)}
    times = times_masked(counts, 0.4, 600)
    assert times[:2].tolist() == [600, 600]  # 4 words each time
    np.testing.assert_allclose(times[2:] / 600, 2 / 8, atol=0.09)


def test_views_sequences_and_seeds_differ_and_view_0_is_plain() -> None:
    text = "word " * 200
    found = [
        mask_spans(text, *key).tobytes() for key in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    ]
    assert len(set(found)) == 4
    assert mask_spans(text, 0, 0, 0).shape == (0, 3)


def test_draws_stay_the_same_for_ever() -> None:
    text = "the quick brown fox jumps over the lazy dog again and again until noon"
    assert mask_spans(text, 42, 1, 17, 0.3).tolist() == [
        [0, 3, KEEP],
        [10, 15, MASK],
        [20, 25, MASK],
        [54, 59, MASK],
    ]
    counts = WordCounts({"the": 900, "quick": 7, "over": 80, "again": 50, "and": 700})
    assert mask_spans(text, 42, 1, 17, 0.3, counts).tolist() == [
        [10, 15, MASK],
        [20, 25, MASK],
        [60, 65, MASK],
        [66, 70, MASK],
    ]


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_teacher_reads_the_masked_words(make_tokenizer: Tokenizers, kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    text = " ".join(SENTENCES)
    (window,) = cut_windows(text, tokenizer, 8000, 0)
    spans = mask_spans(window.text, 3, 1, 0, 0.5)
    specials = set(tokenizer.all_special_ids)
    arguments = (window.ids, window.offsets, window.special, spans)
    vocabulary = MaskVocabulary(tokenizer.mask_token_id, len(tokenizer), specials)
    ids = masked_input(*arguments, vocabulary, DrawKey(3, 1, 0))
    seen = set()
    for token, ((begin, end), old, new) in enumerate(
        zip(window.offsets, window.ids, ids, strict=True)
    ):
        touched = [s for s in spans if max(begin, s[0]) < min(end, s[1])]
        if not touched or window.special[token]:
            assert new == old
            continue
        action = touched[0][2]
        seen.add(int(action))
        if action == MASK:
            assert new == tokenizer.mask_token_id
        elif action == KEEP:
            assert new == old
        else:
            assert 0 <= new < len(tokenizer) and new not in specials
    assert seen == {MASK, RANDOM, KEEP}
    again = masked_input(*arguments, vocabulary, DrawKey(3, 1, 0))
    np.testing.assert_array_equal(ids, again)
    other = masked_input(*arguments, vocabulary, DrawKey(4, 1, 0))
    assert not np.array_equal(ids, other)


def test_no_spans_is_the_plain_text(make_tokenizer: Tokenizers) -> None:
    (window,) = cut_windows("a b c", make_tokenizer("bpe"), 16, 0)
    none = mask_spans(window.text, 0, 0, 0)
    vocabulary, key = MaskVocabulary(4, 600, [0]), DrawKey(0, 0, 0)
    ids = masked_input(window.ids, window.offsets, window.special, none, vocabulary, key)
    assert ids is not window.ids and ids.tolist() == window.ids.tolist()


def test_random_ids_are_uniform_over_what_is_not_special() -> None:
    count = 5000
    text = "a" * count
    offsets = np.column_stack((np.arange(count), np.arange(count) + 1))
    spans = np.array([[0, len(text), RANDOM]], np.int32)
    plain = np.zeros(count, np.int32)
    vocabulary = MaskVocabulary(9, 10, [0, 3, 9, 9, 12])
    ids = masked_input(plain, offsets, plain > 0, spans, vocabulary, DrawKey(1, 2, 3))
    counts = np.bincount(ids, minlength=10)
    assert counts[[0, 3, 9]].tolist() == [0, 0, 0]
    assert (np.abs(counts[[1, 2, 4, 5, 6, 7, 8]] / count - 1 / 7) < 0.02).all()


def test_words_are_counted(tmp_path: Path) -> None:
    texts = ["Один, two two", "  ", "one\ud800two don't\n", "don't"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = masked_views.count_words(Corpus.open([str(path)]))
    expected = {"Один": 1, ",": 1, "two": 3, "one": 1, "\ufffd": 1, "don't": 2}
    assert found.counts == expected


def test_every_source_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source of a corpus is counted in part, so no language is missing from the counts."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} {name}\n" * (1 if name == "c" else 50))
    monkeypatch.setattr(masked_views, "COUNTED_WORDS", 23)
    corpus = Corpus.open([str(tmp_path)])
    found = masked_views.count_words(corpus)
    assert found.counts == {"a": 8, "b": 8, "c": 2}  # whole texts, at least 23 // 3 words
    assert found == masked_views.count_words(corpus)


def test_teachers_with_other_tokens_read_the_same_masks(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 40, ENGLISH)
    kept = {"views": 2, "mask_words": "rare", "logits": "none", "attention": "none"}
    one, two = (
        open_store(dumped(tiny_teacher(kind), corpus, tmp_path / f"{kind}.zarr", **kept))
        for kind in ("bert", "deberta")
    )
    counts = WordCounts.stored(one)
    assert counts and counts == WordCounts.stored(two)
    masked, alike = [], 0
    for left in one:
        right = two[left.index]
        assert left.text == right.text
        spans = left.views[1].spans
        np.testing.assert_array_equal(spans, right.views[1].spans)
        masked += [left.text[begin:end] for begin, end, _ in spans]
        alike += len(left.token_ids) == len(right.token_ids)
    assert alike < len(one) == 40
    every = [word for record in one for word in maskable_words(record.text)]
    assert counts.of(masked).mean() < 0.8 * counts.of(every).mean()
