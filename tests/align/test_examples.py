"""Small alignments with expected results written by hand, one for each problem with offsets."""

from __future__ import annotations

import numpy as np
import pytest

from teachonce.align import (
    Alignment,
    AlignmentError,
    FlatText,
    Tokens,
    align_bytes,
    align_match,
    align_reduce,
    align_span,
)
from teachonce.support.arrays import Array
from tests.align.support import pairs, plain_tokens, vocabulary_map

Spans = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("text", "teacher", "student", "expected"),
    [
        pytest.param(
            "a bc", [(0, 1), (1, 4)], [(0, 1), (2, 3), (3, 4)],
            [((0, 1), (0, 1)), ((1, 2), (1, 3))],
            id="leading blank in the offsets",
        ),
        pytest.param(
            "a  b", [(0, 1), (1, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)],
            [((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2, 3))],
            id="tokens of blanks only",
        ),
        pytest.param(
            "x🙂y", [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)],
            [((0, 1), (0, 1)), ((1, 4), (1, 2)), ((4, 5), (2, 3))],
            id="bytes of one character",
        ),
        pytest.param(
            "🙂🙂", [(0, 1), (0, 2), (1, 2)], [(0, 1), (1, 2)], [((0, 3), (0, 2))],
            id="bytes across two characters",
        ),
        pytest.param(
            "ab", [(0, 0), (0, 1), (1, 2)], [(0, 1), (1, 1), (1, 2)],
            [((1, 2), (0, 1)), ((2, 3), (2, 3))],
            id="zero-width tokens",
        ),
        pytest.param(
            "a\u200bb c", [(0, 1), (1, 2), (2, 3), (4, 5)], [(0, 3), (4, 5)],
            [((0, 3), (0, 1)), ((3, 4), (1, 2))],
            id="a format character inside a word",
        ),
        pytest.param(
            "a \u200b b", [(0, 1), (2, 3), (4, 5)], [(0, 1), (4, 5)],
            [((0, 1), (0, 1)), ((2, 3), (1, 2))],
            id="a format character of its own",
        ),
        pytest.param(
            "cafe\u0301s", [(0, 5), (5, 6)], [(0, 4), (5, 6)], [((0, 1), (0, 1)), ((1, 2), (1, 2))],
            id="a stripped accent",
        ),
        pytest.param(
            "❤\ufe0f!", [(0, 2), (2, 3)], [(0, 1), (2, 3)], [((0, 1), (0, 1)), ((1, 2), (1, 2))],
            id="a dropped variation selector",
        ),
        pytest.param(
            "a\ufffdb", [(0, 2), (2, 3)], [(0, 1), (2, 3)], [((0, 1), (0, 1)), ((1, 2), (1, 2))],
            id="a dropped replacement character",
        ),
        pytest.param(
            "a#b c", [(0, 2), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)],
            [((1, 2), (1, 2)), ((2, 3), (2, 3))],
            id="a dropped letter or sign costs its run only",
        ),
        pytest.param(
            "one story", [(0, 3), (4, 9)], [(0, 3), (4, 7)], [((0, 1), (0, 1))],
            id="a student cut inside a word",
        ),
        pytest.param(
            "abcd", [(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)], [((0, 2), (0, 3))],
            id="no common cut inside",
        ),
        pytest.param(
            "abc", [(0, 2), (1, 2), (0, 1), (2, 3)], [(0, 1), (1, 2), (2, 3)],
            [((0, 3), (0, 2)), ((3, 4), (2, 3))],
            id="tokens out of order share a run",
        ),
        pytest.param(
            "abc", [(1, 2), (0, 1), (2, 3)], [(0, 1), (1, 2), (2, 3)],
            [((0, 2), (0, 2)), ((2, 3), (2, 3))],
            id="two tokens exchanged share a run",
        ),
        pytest.param("", [], [], [], id="no text"),
        pytest.param("abc", [(0, 3)], [], [], id="no student token"),
    ],
)  # fmt: skip
def test_spans(text: str, teacher: Spans, student: Spans, expected: list[object]) -> None:
    flat, sides = FlatText.of([text]), (plain_tokens(teacher), plain_tokens(student))
    assert pairs(align_span(flat, *sides)) == expected
    assert pairs(align_span(flat, *sides[::-1]).swap()) == expected


def test_sequences_stay_apart() -> None:
    text = FlatText.of(["ab", "", "ab "])
    teacher = plain_tokens([(0, 2)], [], [(0, 1), (1, 3)])
    student = plain_tokens([(0, 1), (1, 2)], [], [(0, 2)])
    assert pairs(align_span(text, teacher, student)) == [((0, 1), (0, 2)), ((1, 3), (2, 3))]


def test_a_special_token_inside_a_run_drops_it() -> None:
    text = FlatText.of(["ab[M]cd e"])
    teacher = plain_tokens([(0, 2), (2, 5), (5, 7), (8, 9)], special=[1])
    one_word = plain_tokens([(0, 7), (8, 9)])
    assert pairs(align_span(text, teacher, one_word)) == [((3, 4), (1, 2))]
    assert pairs(align_span(text, teacher, teacher)) == [
        ((0, 1), (0, 1)),
        ((2, 3), (2, 3)),
        ((3, 4), (3, 4)),
    ]
    without_width = plain_tokens([(0, 2), (0, 0), (2, 7), (8, 9)], special=[1])
    assert pairs(align_span(text, without_width, one_word)) == [((3, 4), (1, 2))]


def test_offsets_of_special_tokens_are_not_read() -> None:
    text = FlatText.of(["ab"])
    teacher = plain_tokens([(7, 9), (0, 2)], special=[0])
    assert pairs(align_span(text, teacher, plain_tokens([(0, 2)]))) == [((1, 2), (0, 1))]


def test_alignment_refuses_what_is_not_pairs_of_runs() -> None:
    runs = np.zeros((2, 2), np.int32)
    with pytest.raises(AlignmentError, match="2 of the teacher, 1 of the student"):
        Alignment(runs, runs[:1])
    with pytest.raises(AlignmentError, match=r"expected int32 \[G, 2\], got int64 \[2, 2\]"):
        Alignment(runs, runs.astype(np.int64))


def test_inputs_that_do_not_fit_are_refused_with_the_place() -> None:
    text, good = FlatText.of(["ab", "cd"]), plain_tokens([(0, 2)], [(0, 2)])
    with pytest.raises(AlignmentError, match="student: 1 sequences for 2 texts"):
        align_span(text, good, plain_tokens([(0, 2)]))
    with pytest.raises(
        AlignmentError, match="teacher, sequence 1: token 1 covers characters 1 to 3 of a text of 2"
    ):
        align_span(text, plain_tokens([(0, 2)], [(0, 1), (1, 3)]), good)
    vocabulary = vocabulary_map("bpe", "bpe")
    wrong = Tokens.of([[1], [999]], [[(0, 2)], [(0, 2)]], [[0], [0]])
    with pytest.raises(AlignmentError, match="sequence 1: token id 999 .* its vocabulary of 400"):
        align_match(text, wrong, good, vocabulary)
    with pytest.raises(AlignmentError, match="token id 999"):
        align_reduce(wrong, vocabulary)
    with pytest.raises(AlignmentError, match="student, sequence 1: token id 999 .*student's own"):
        align_bytes(text, good, wrong, vocabulary)
    with pytest.raises(AlignmentError, match="max_length: expected at least 1, got 0"):
        align_reduce(good, vocabulary, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.zeros((2, 3), int)}, r"offsets: expected integers \[2, 2\], got int64"),
        ({"special": np.zeros(2, np.uint8)}, r"special: expected bool \[2\], got uint8"),
        ({"ids": np.zeros(2)}, "ids: expected integers"),
        ({"start": np.array([0, 1])}, "start: expected ascending numbers from 0 to 2"),
        ({"start": np.array([0, 2, 1, 2], np.uint32)}, "start"),
    ],
)  # fmt: skip
def test_tokens_that_are_not_a_flat_batch_are_refused(
    change: dict[str, Array], message: str
) -> None:
    good = {
        "ids": np.zeros(2, np.uint32),
        "offsets": np.zeros((2, 2), np.int32),
        "special": np.zeros(2, bool),
        "start": np.array([0, 2], np.uint32),
    }
    assert len(Tokens(**good)) == 1
    with pytest.raises(AlignmentError, match=message):
        Tokens(**{**good, **change})


def test_flat_text_counts_characters() -> None:
    text = FlatText.of(["👍🏽 a", "", "e\u0301\ud800"])
    assert text.start.tolist() == [0, 4, 4, 7]
    assert text.codepoints.tolist() == [0x1F44D, 0x1F3FD, 0x20, 0x61, 0x65, 0x301, 0xD800]
    assert text.space.tolist() == [False, False, True, False, False, False, False]
    assert text.solid.tolist() == [True, True, False, True, True, False, False]
    assert len(FlatText.of([])) == 0
