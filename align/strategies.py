"""Alignments, and the strategies `match`, `span`, `bytes` and `reduce` over flat batches.

No function loops over tokens in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from teachonce.align.byte_edges import shared_runs
from teachonce.align.mapping import VocabularyMap
from teachonce.align.text import AlignmentError, Booleans, FlatText, Integers, Tokens
from teachonce.support.arrays import ranges, runs_of_equal, starts

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Holds G pairs of half-open runs of flat token numbers, in the order of the text.

    teacher, student: int32 [G, 2]. Teacher tokens teacher[g, 0] ... teacher[g, 1] - 1 cover the
        same characters as student tokens student[g, 0] ... student[g, 1] - 1. No run is empty or
        crosses a sequence. Runs of one tokenization are disjoint and ascend.

    Raises AlignmentError for other shapes and dtypes, and for different numbers of runs.
    """

    teacher: NDArray[np.int32]
    student: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name, runs in (("teacher", self.teacher), ("student", self.student)):
            if runs.ndim != 2 or runs.shape[1] != 2 or runs.dtype != np.int32:
                raise AlignmentError(
                    f"{name} runs: expected int32 [G, 2], got {runs.dtype} {list(runs.shape)}"
                )
        if len(self.teacher) != len(self.student):
            raise AlignmentError(
                f"expected equal numbers of runs, got {len(self.teacher)} of the teacher,"
                f" {len(self.student)} of the student"
            )

    def __len__(self) -> int:
        return len(self.teacher)

    def __repr__(self) -> str:
        if len(self) > 8:
            return f"Alignment({len(self)} pairs)"
        return f"Alignment(teacher={self.teacher.tolist()}, student={self.student.tolist()})"

    def swap(self) -> Alignment:
        """Return the same pairs with teacher and student exchanged."""
        return Alignment(self.student, self.teacher)


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """Holds the student's input that `align_reduce` makes from the teacher's tokens.

    tokens: S student tokens; each piece has the offsets, special flag and type of its teacher
        token.
    unknown: bool [S], pieces of teacher tokens that the student cannot spell.
    alignment: each teacher token with the run of its pieces. Special tokens are left out, and so
        are tokens that the student's normaliser deletes.
    """

    tokens: Tokens
    unknown: Booleans
    alignment: Alignment


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Holds the n tokens of one tokenization that cover characters, in the order of the text.

    token: flat token numbers [n].
    begin, end: spans in characters of the joined text [n], never empty.
    reach: the largest end up to each token [n]. It exceeds a token's `end` if an earlier token
        ends later in the text.
    """

    token: Index
    begin: Index
    end: Index
    reach: Index

    @classmethod
    def of(cls, text: FlatText, tokens: Tokens, side: str) -> _Spans:
        _check_offsets(text, tokens, side, ~tokens.special)
        counts = np.diff(tokens.start).astype(np.int64)
        begin, end = tokens.offsets.astype(np.int64).T
        token = np.flatnonzero((end > begin) & ~tokens.special)
        shift = np.repeat(text.start[:-1], counts)[token]
        begin, end = begin[token] + shift, end[token] + shift
        # Byte-level offsets include the space before a word, offsets of WordPiece do not. Without
        # trimming, `span` and `match` would lose most words between such tokenizers.
        _trim(text, begin, end)
        # Runs are contiguous, so a token that begins before an earlier token's end joins its run.
        return cls(token, begin, end, np.maximum.accumulate(end))


def _check_offsets(text: FlatText, tokens: Tokens, side: str, checked: Booleans) -> None:
    if len(tokens) != len(text):
        raise AlignmentError(f"{side}: {len(tokens)} sequences for {len(text)} texts")
    lengths = np.repeat(np.diff(text.start), np.diff(tokens.start))
    begin, end = tokens.offsets.astype(np.int64).T
    wrong = checked & ((begin < 0) | (end < begin) | (end > lengths))
    if wrong.any():
        token = int(wrong.argmax())
        sequence = tokens.sequence_of(token)
        raise AlignmentError(
            f"{side}, sequence {sequence}: token {token - int(tokens.start[sequence])} covers"
            f" characters {begin[token]} to {end[token]} of a text of {lengths[token]}; pass the"
            " text that was tokenized"
        )


def _trim(text: FlatText, begin: Index, end: Index) -> None:
    """Remove white space from both edges of each span, in place. Spans of white space alone are
    unchanged."""
    filled = np.flatnonzero(~text.space)
    counts = starts(~text.space)  # number of filled characters before each character
    low, high = counts[begin], counts[end]
    nonblank = np.flatnonzero(high > low)
    begin[nonblank] = filled[low[nonblank]]
    end[nonblank] = filled[high[nonblank] - 1] + 1


def _runs(spans: _Spans, group: Index) -> tuple[Index, Index, Index]:
    """Return runs of tokens that begin in one group: for each run its group, its first token, and
    its last token plus one. `group` has the group of each character."""
    of_token = group[spans.begin]
    first, last = runs_of_equal(of_token)
    return of_token[first], spans.token[first], spans.token[last] + 1


def _holds_special(tokens: Tokens, first: Index, end: Index) -> Booleans:
    counts = starts(tokens.special)
    return counts[end] > counts[first]


def _as_runs(first: Integers, end: Integers) -> NDArray[np.int32]:
    return np.stack((first.astype(np.int32), end.astype(np.int32)), axis=1)


def align_span(text: FlatText, teacher: Tokens, student: Tokens) -> Alignment:
    """Pair the smallest runs of tokens that cover the same characters.

    A token's span is its offsets without white space at the edges, unless it is white space alone.
    Special tokens and tokens with an empty span are left out. A cut is a position between two
    characters that is inside no token of either tokenization. The tokens between two consecutive
    cuts form a pair of runs if both tokenizations have tokens there and cover the same solid
    characters. White space and ignorable characters (`align.text.character_class`) may be covered
    by one tokenization alone, as normalisers drop them.

    So tokens that share a character are in one run. A character that one tokenizer drops costs at
    most the run around it. If the student's input is truncated, it is aligned up to its end.

    Raises AlignmentError if the numbers of sequences differ or offsets lie outside the text.
    """
    sides = _Spans.of(text, teacher, "teacher"), _Spans.of(text, student, "student")
    size = len(text.codepoints) + 1
    cut = np.ones(size, bool)
    covered = []
    for spans in sides:
        # Counts over all characters of the batch, as a loop over sequences is slower. This aligns
        # 2.8 to 3.4 million teacher tokens a second in batches of 16,384, and 1.6 to 1.8 million in
        # batches of 2,048 (RESULTS, "Aligning a decoder").
        begins = np.bincount(spans.begin, minlength=size)
        depth = np.cumsum(begins - np.bincount(spans.reach, minlength=size))
        cut &= depth == begins  # every token over this character begins with it
        # `reach` may span a gap between two tokens that are not in order; no token covers the gap.
        if (spans.reach != spans.end).any():
            depth = np.cumsum(begins - np.bincount(spans.end, minlength=size))
        covered.append(depth > 0)
    group = np.cumsum(cut)
    bad = np.zeros(group[-1] + 1, bool)
    bad[group[np.flatnonzero((covered[0] != covered[1])[:-1] & text.solid)]] = True
    (t_group, t_first, t_end), (s_group, s_first, s_end) = (_runs(side, group) for side in sides)
    run_of = np.full(len(bad), -1, np.int64)
    run_of[s_group] = np.arange(len(s_group))
    run_of[bad] = -1
    partner = run_of[t_group]
    paired = np.flatnonzero(partner >= 0)
    t_first, t_end = t_first[paired], t_end[paired]
    s_first, s_end = s_first[partner[paired]], s_end[partner[paired]]
    special = _holds_special(teacher, t_first, t_end) | _holds_special(student, s_first, s_end)
    pure = np.flatnonzero(~special)
    return Alignment(_as_runs(t_first[pure], t_end[pure]), _as_runs(s_first[pure], s_end[pure]))


def align_bytes(
    text: FlatText, teacher: Tokens, student: Tokens, vocabulary: VocabularyMap
) -> Alignment:
    """Pair the smallest runs of tokens that cover the same UTF-8 bytes, without trimming.

    A cut is a byte at which tokens of both tokenizations end, or the start of a text. The tokens
    between two cuts are a pair. So a model that reads from left to right predicts the first
    tokens after a cut from the same text on both sides. A cut may lie inside a character. Ends are
    computed from offsets and the bytes of pieces (`align.byte_edges.token_ends`). A special token
    that covers characters ends a run and belongs to none.

    Raises AlignmentError as `align_span` does, and for an id outside its vocabulary.
    """
    sizes = len(vocabulary.teacher), len(vocabulary.student)
    for side, tokens, size in zip(("teacher", "student"), (teacher, student), sizes, strict=True):
        _check_ids(tokens, size, side)
        covers = tokens.offsets[:, 1] > tokens.offsets[:, 0]
        _check_offsets(text, tokens, side, ~tokens.special | covers)
    pieces = vocabulary.teacher_bytes, vocabulary.student_bytes
    t, s = shared_runs(text, teacher, student, pieces)
    return Alignment(t.astype(np.int32), s.astype(np.int32))


def align_match(
    text: FlatText, teacher: Tokens, student: Tokens, vocabulary: VocabularyMap
) -> Alignment:
    """Pair single tokens that cover the same characters and are equal pieces.

    Selects the pairs of `align_span` that have one token on each side and whose student id is
    `match` of the teacher id in one of the maps of `vocabulary` (Kolesnikova et al. 2022, "match").

    Raises AlignmentError as `align_span` does, and for a teacher id outside the vocabulary.
    """
    _check_ids(teacher, len(vocabulary.teacher))
    pairs = align_span(text, teacher, student)
    t, s = pairs.teacher[:, 0], pairs.student[:, 0]
    single = (pairs.teacher[:, 1] - t == 1) & (pairs.student[:, 1] - s == 1)
    t, s = t[single], s[single]
    # Any map may match: the piece that the student reads shows which map applies at its place.
    equal = np.zeros(len(t), bool)
    for mapping in vocabulary.maps:
        equal |= mapping.match[teacher.ids[t]] == student.ids[s]
    t, s = t[equal], s[equal]
    return Alignment(_as_runs(t, t + 1), _as_runs(s, s + 1))


def align_reduce(
    teacher: Tokens, vocabulary: VocabularyMap, max_length: int | None = None
) -> Reduced:
    """Split the teacher's tokens into student pieces, and pair each token with its own pieces.

    Special tokens become the student's own. If a sequence has more than `max_length` pieces, it is
    truncated after a whole teacher token, and its final special token is appended (Kolesnikova et
    al. 2022, "reduce").

    Raises AlignmentError for a teacher id outside the vocabulary and for max_length < 1.
    """
    if max_length is not None and max_length < 1:
        raise AlignmentError(f"max_length: expected at least 1, got {max_length}")
    _check_ids(teacher, len(vocabulary.teacher))
    first = vocabulary.split_start[teacher.ids]
    counts = vocabulary.split_start[teacher.ids.astype(np.int64) + 1] - first
    if max_length is not None:
        counts = np.where(_within_length(teacher, counts, max_length), counts, 0)
    bounds = starts(counts)
    token = np.repeat(np.arange(len(counts)), counts)
    position = ranges(first, counts)
    pieces = Tokens(
        vocabulary.split_ids[position],
        teacher.offsets[token],
        teacher.special[token],
        bounds[teacher.start],
        None if teacher.types is None else teacher.types[token],
    )
    source = np.flatnonzero((counts > 0) & ~teacher.special)
    alignment = Alignment(
        _as_runs(source, source + 1), _as_runs(bounds[source], bounds[source + 1])
    )
    return Reduced(pieces, vocabulary.unknown[teacher.ids][token], alignment)


def _within_length(tokens: Tokens, counts: Index, max_length: int) -> Booleans:
    """Find the tokens that remain if each sequence is truncated to max_length pieces: bool [T]."""
    start = tokens.start.astype(np.int64)
    lengths = np.diff(start)
    bounds = starts(counts)
    total = bounds[start[1:]] - bounds[start[:-1]]
    final = np.zeros(len(counts), bool)
    final[start[1:][lengths > 0] - 1] = True
    final &= tokens.special
    # Room for the final special token, as tokenizers reserve it when they truncate.
    closing = np.zeros(len(lengths), np.int64)
    closing[np.searchsorted(start, np.flatnonzero(final), "right") - 1] = counts[final]
    limit = np.where(total > max_length, max_length - closing, max_length)
    used = bounds[1:] - np.repeat(bounds[start[:-1]], lengths)
    remaining: Booleans = (used <= np.repeat(limit, lengths)) | final
    return remaining


def _check_ids(tokens: Tokens, size: int, side: str = "teacher") -> None:
    # NumPy counts a negative index from the end: such an id would silently get another token's
    # pieces.
    wrong = (tokens.ids < 0) | (tokens.ids >= size)
    if wrong.any():
        token = int(wrong.argmax())
        raise AlignmentError(
            f"{side}, sequence {tokens.sequence_of(token)}: token id {tokens.ids[token]} is outside"
            f" its vocabulary of {size}; tokenize with the {side}'s own tokenizer"
        )


@dataclass(frozen=True)
class Tokenizations:
    """Holds B texts in the teacher's tokenization and in the student's.

    vocabulary: maps the teacher's pieces to the student's.
    max_length: the maximum number of tokens of a text that the student reads.
    """

    texts: Sequence[str]
    teacher: Tokens
    student: Tokens
    vocabulary: VocabularyMap
    max_length: int

    @cached_property
    def text(self) -> FlatText:
        """Join the characters of the texts; cached, as all strategies of a batch use them."""
        return FlatText.of(self.texts)

    def align(self, strategy: str) -> tuple[Tokens, Alignment]:
        """Return the student's input and its alignment, as the strategy of this name makes them.

        `reduce` makes the input from the teacher's tokens; `span`, `match` and `bytes` use the
        student's own tokenization. Raises AlignmentError as the strategies do, and for an unknown
        name.
        """
        match strategy:
            case "span":
                return self.student, align_span(self.text, self.teacher, self.student)
            case "match":
                pairs = align_match(self.text, self.teacher, self.student, self.vocabulary)
                return self.student, pairs
            case "bytes":
                pairs = align_bytes(self.text, self.teacher, self.student, self.vocabulary)
                return self.student, pairs
            case "reduce":
                reduced = align_reduce(self.teacher, self.vocabulary, self.max_length)
                return reduced.tokens, reduced.alignment
        raise AlignmentError(f"strategy: expected span, match, bytes or reduce, got {strategy!r}")
