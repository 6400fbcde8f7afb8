"""Choose the map of two vocabularies that applies at each place of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from teachonce.align.mapping import VocabularyMap
from teachonce.align.text import Booleans, FlatText, Integers, Tokens, classes
from teachonce.align.vocabulary import isolation

AS_MARKED, AT_EDGE, INSIDE = 0, 1, 2  # the maps of `VocabularyMap.maps`


def maps_at(
    text: FlatText,
    teacher: Tokens,
    student: Tokens,
    vocabulary: VocabularyMap,
    runs: tuple[Integers, Integers],
) -> NDArray[np.int64]:
    """Choose the map for the teacher's distribution at each place: int64 [G], indices of
    `vocabulary.maps`.

    runs: the teacher's token at each place, [G], and the student's run, [G, 2], flat numbers.

    The student's own token shows whether its piece has a mark there, whatever its tokenizer puts in
    front of a text. The teacher's marks hold if its token has the same; if not, all of its pieces
    are at the edge of a word there, or none is. If the token does not show it, such as isolated
    punctuation, `_word_starts` decides by the text.
    """
    if len(vocabulary.maps) == 1:
        return np.zeros(len(runs[0]), np.int64)
    style = vocabulary.student.marks.style
    edges, showing = vocabulary.student_edges
    token = student.ids[runs[1][:, 1] - 1 if style == "suffix" else runs[1][:, 0]]
    edge, shown = edges[token], showing[token]
    if style == "suffix":
        elsewhere = np.where(edge, AT_EDGE, INSIDE)
        same = ~shown
        if vocabulary.teacher.marks.style == "suffix":
            same |= edge == vocabulary.teacher_ends[teacher.ids[runs[0]]]
        return np.where(same, AS_MARKED, elsewhere)
    teacher_begins = vocabulary.begins[0][teacher.ids[runs[0]]]
    starts = _word_starts(text, teacher, vocabulary, runs[0])
    if style == "blank":
        # Right after a letter, WordPiece's `story` means a word after a space, so its mark remains.
        # Where a word can begin without a space, as after a bracket, it means no space.
        inside = ~edge & (teacher_begins | starts)
        return np.where(edge & ~teacher_begins, AT_EDGE, np.where(inside, INSIDE, AS_MARKED))
    match vocabulary.teacher.marks.style:
        case "blank":
            # A teacher token with a space begins a word. The student's token there does not decide
            # for the other pieces of the distribution, so their place does.
            return np.where(np.where(shown & ~teacher_begins, edge, starts), AT_EDGE, AS_MARKED)
        case "prefix":
            edge = np.where(shown, edge, starts)
            return np.where(edge == teacher_begins, AS_MARKED, np.where(edge, AT_EDGE, INSIDE))
    return np.where(np.where(shown, edge, starts), AT_EDGE, INSIDE)


def _word_starts(
    text: FlatText, teacher: Tokens, vocabulary: VocabularyMap, tokens: Integers
) -> Booleans:
    """Return which `tokens` of the teacher begin a word of the side that marks pieces inside words
    (the student if both sides do): bool [G], false if neither side does.

    A token, with the space that its piece begins with, begins a word at the start of the text, and
    after white space or a character that this side isolates.
    """
    sides = vocabulary.teacher.marks, vocabulary.student.marks
    prefixed = [marks for marks in sides if marks.style == "prefix"]
    if not prefixed:
        return np.zeros(len(tokens), bool)
    low = text.start[np.searchsorted(teacher.start, tokens, "right") - 1]
    position = low + teacher.offsets[tokens, 0]
    # Some tokenizers do not count the space of a token in its offsets.
    uncounted = ~text.space[position] & (position > low) & text.space[position - 1]
    position -= uncounted & vocabulary.teacher_bytes.blank_first[teacher.ids[tokens]]
    begins: Booleans = (position == low) | text.space[position - 1]
    begins |= (classes(text.codepoints[position - 1], isolation) & prefixed[-1].isolates) > 0
    return begins
