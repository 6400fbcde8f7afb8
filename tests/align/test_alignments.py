"""Alignments: small ones by hand, the laws of all of them, and stored ones.

- Small alignments with expected results written by hand, one for each problem with offsets.
- The laws of an alignment, for every pair of tokenizer kinds over unusual texts.
- Alignments equal those in the files that `golden/make.py` wrote from stored texts and tokenizers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.align import (
    Alignment,
    AlignmentError,
    FlatText,
    Tokens,
    Vocabulary,
    VocabularyMap,
    align_bytes,
    align_match,
    align_reduce,
    align_span,
)
from teachonce.align.places import maps_at
from teachonce.support.arrays import Array
from tests.align.golden.make import alignments_of
from tests.align.support import (
    BLANK_KINDS,
    KINDS,
    PAIRS,
    TEXT,
    TEXTS,
    check_laws,
    encode,
    pairs,
    plain_tokens,
    reference_span,
    same_arrays,
    vocabulary,
    vocabulary_map,
)

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


few = settings(max_examples=25, deadline=None)


@few
@given(TEXTS, st.none() | st.integers(2, 9))
def test_span_is_its_definition_and_keeps_the_laws(
    texts: list[str], max_length: int | None
) -> None:
    """The student's sequences may be cut to fewer tokens than the teacher's."""
    text = FlatText.of(texts)
    tokens = {kind: encode(kind, texts) for kind in KINDS}
    cut = {kind: encode(kind, texts, max_length) for kind in KINDS}
    for teacher, student in PAIRS:
        found = align_span(text, tokens[teacher], cut[student])
        assert pairs(found) == reference_span(texts, tokens[teacher], cut[student])
        check_laws(text, tokens[teacher], cut[student], found)
        swapped = align_span(text, cut[student], tokens[teacher])
        assert same_arrays(found.swap(), swapped)


@few
@given(TEXTS)
def test_a_tokenization_aligned_with_itself_is_the_identity(texts: list[str]) -> None:
    text = FlatText.of(texts)
    for kind in KINDS:
        tokens = encode(kind, texts)
        found = align_span(text, tokens, tokens)
        assert np.array_equal(found.teacher, found.student)
        covering = ~tokens.special & (tokens.offsets[:, 0] < tokens.offsets[:, 1])
        inside = np.zeros(len(tokens.ids), bool)
        for first, last in found.teacher:
            inside[first:last] = True
        assert inside[covering].all() and not inside[tokens.special].any()
        shares = tokens.offsets[1:, 0] < tokens.offsets[:-1, 1]
        for first, last in found.teacher:  # a run is longer only where tokens share a character
            assert shares[first : last - 1].all()


SPANS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted).map(tuple), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.text("ab \u0301\U0001f642", min_size=8, max_size=8), SPANS, SPANS)
def test_offsets_that_overlap_and_step_back_keep_the_laws(
    text: str, teacher: list[tuple[int, int]], student: list[tuple[int, int]]
) -> None:
    sides = plain_tokens(teacher), plain_tokens(student)
    flat, found = FlatText.of([text]), align_span(FlatText.of([text]), *sides)
    check_laws(flat, *sides, found)
    assert same_arrays(found.swap(), align_span(flat, *sides[::-1]))


@few
@given(TEXTS)
def test_match_keeps_the_single_pairs_of_span_that_are_one_piece(texts: list[str]) -> None:
    text = FlatText.of(texts)
    tokens = {kind: encode(kind, texts) for kind in KINDS}
    for teacher, student in PAIRS:
        # The student's piece decides which of the maps applies at a position.
        match = [each.match for each in vocabulary_map(teacher, student).maps]
        span = pairs(align_span(text, tokens[teacher], tokens[student]))
        expected = [
            ((t, t_end), (s, s_end))
            for (t, t_end), (s, s_end) in span
            if t_end - t == s_end - s == 1
            and tokens[student].ids[s] in [each[tokens[teacher].ids[t]] for each in match]
        ]
        found = align_match(
            text, tokens[teacher], tokens[student], vocabulary_map(teacher, student)
        )
        assert pairs(found) == expected


@few
@given(TEXTS, st.sampled_from(PAIRS), st.one_of(st.none(), st.integers(1, 12)))
def test_reduce_is_its_definition(
    texts: list[str], kinds: tuple[str, str], max_length: int | None
) -> None:
    teacher, vocabulary = encode(kinds[0], texts), vocabulary_map(*kinds)
    found = align_reduce(teacher, vocabulary, max_length)
    ids, special = list[int](), list[bool]()
    start, runs = [0], []
    for sequence in range(len(texts)):
        tokens = list(range(int(teacher.start[sequence]), int(teacher.start[sequence + 1])))
        split = {token: vocabulary.split(int(teacher.ids[token])).tolist() for token in tokens}
        if max_length is not None and sum(map(len, split.values())) > max_length:
            kept, room = [], max_length - 1  # the last token, sep, is one piece
            for token in tokens[:-1]:
                room -= len(split[token])
                if room < 0:
                    break
                kept.append(token)
            tokens = [*kept, tokens[-1]]
        for token in tokens:
            if split[token] and not teacher.special[token]:
                runs.append(((token, token + 1), (len(ids), len(ids) + len(split[token]))))
            ids += split[token]
            special += [bool(teacher.special[token])] * len(split[token])
        start.append(len(ids))
        assert max_length is None or start[-1] - start[-2] <= max_length
    assert found.tokens.ids.tolist() == ids and found.tokens.start.tolist() == start
    assert found.tokens.special.tolist() == special and pairs(found.alignment) == runs
    for (token, _), (first, last) in runs:
        assert (found.tokens.offsets[first:last] == teacher.offsets[token]).all()
        assert (found.unknown[first:last] == vocabulary.unknown[teacher.ids[token]]).all()


STUDENTS = ("wordpiece", "wordpiece-lower", "wordpiece-bare", "bpe-ends", *BLANK_KINDS)
# A student of this kind tokenizes the second point of `..` as `##.`, which no map contains.
TEACHERS = ("wordpiece-runs", *STUDENTS)
PUNCTUATED = st.lists(
    st.one_of(
        st.sampled_from((" ", "  ", "\n", "\t", "(", '"', "“", "-", "«", ".", "—", ") ", ", ")),
        st.sampled_from(("the", "story", "s", "a", "teacher", "учитель", "žiak", "猫", "1")),
    ),
    max_size=20,
).map("".join)


@few
@given(
    st.lists(PUNCTUATED | TEXT, min_size=1, max_size=3),
    st.sampled_from(TEACHERS),
    st.sampled_from(STUDENTS),
)
def test_a_piece_of_the_same_characters_is_the_one_that_the_student_reads(
    texts: list[str], teacher: str, student: str
) -> None:
    """If a token of each side covers the same characters, `match` pairs them, and the map of that
    position returns the student's piece."""
    text, vocabularies = FlatText.of(texts), vocabulary_map(teacher, student)
    sides = encode(teacher, texts), encode(student, texts)
    runs = align_span(text, *sides)
    single = ((runs.teacher[:, 1] - runs.teacher[:, 0]) == 1) & (np.diff(runs.student)[:, 0] == 1)
    first = runs.teacher[single, 0], runs.student[single, 0]
    ids = [side.ids[rows] for side, rows in zip(sides, first, strict=True)]
    spelled = [
        [vocabulary(kind).pieces[i].text for i in own]
        for kind, own in zip((teacher, student), ids, strict=True)
    ]
    same = np.array([own == theirs for own, theirs in zip(*spelled, strict=True)], bool)
    found = np.stack([each.match for each in vocabularies.maps])
    places = maps_at(text, *sides, vocabularies, (first[0], runs.student[single]))
    assert found[places, ids[0]][same].tolist() == ids[1][same].tolist()
    matched = align_match(text, *sides, vocabularies)
    assert set(first[0][same]) <= set(matched.teacher[:, 0])


FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "alignments.json").read_text(encoding="utf-8"))


def tokens_of(kind: str) -> Tokens:
    dtypes = {"ids": np.uint32, "offsets": np.int32, "special": bool, "start": np.int64}
    kept = GOLDEN["tokens"][kind]
    return Tokens(**{name: np.array(kept[name], dtype) for name, dtype in dtypes.items()})


@pytest.mark.parametrize(
    "kept", GOLDEN["alignments"], ids=lambda kept: f"{kept['teacher']}-{kept['student']}"
)
def test_golden(kept: dict[str, Any]) -> None:
    kinds = kept["teacher"], kept["student"]
    files = ((FOLDER / f"{kind}.json").read_text(encoding="utf-8") for kind in kinds)
    vocabulary = VocabularyMap.between(*map(Vocabulary.from_tokenizer_json, files))
    text, sides = FlatText.of(GOLDEN["texts"]), (tokens_of(kinds[0]), tokens_of(kinds[1]))
    found = alignments_of(text, sides, vocabulary, kept["reduce_max_length"])
    assert found | dict(zip(("teacher", "student"), kinds, strict=True)) == kept
