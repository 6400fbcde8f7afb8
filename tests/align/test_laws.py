"""The laws of an alignment, for every pair of tokenizer kinds over unusual texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.align import FlatText, align_match, align_reduce, align_span
from teachonce.align.places import maps_at
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
