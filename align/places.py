"""Choose the map of `VocabularyMap.maps` that applies at each place of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from teachonce.align.mapping import VocabularyMap
from teachonce.align.text import Booleans, FlatText, Integers, Tokens, classes
from teachonce.align.vocabulary import isolation

AS_MARKED, AT_EDGE, INSIDE = 0, 1, 2  # indices of `VocabularyMap.maps`


def maps_at(
    text: FlatText,
    teacher: Tokens,
    student: Tokens,
    vocabulary: VocabularyMap,
    runs: tuple[Integers, Integers],
) -> NDArray[np.int64]:
    """Choose the map for the teacher's distribution at each of G places: int64 [G], indices of
    `vocabulary.maps`.

    runs: the flat numbers of the teacher's token at each place, [G], and the student's run of
    tokens there, [G, 2].

    The mark of the student's token shows whether a word has its edge at this place, whatever the
    student's tokenizer puts in front of a text. If the mark of the teacher's token shows the same,
    the map AS_MARKED applies. If not, AT_EDGE or INSIDE applies to all pieces of the distribution.
    If the student's token shows nothing, such as isolated punctuation, `_word_starts` decides by
    the text.
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
        # Right after a letter, WordPiece's `story` stands for a word after a space: AS_MARKED.
        # Where a word can begin without a space, as after a bracket, it stands for no space.
        inside = ~edge & (teacher_begins | starts)
        return np.where(edge & ~teacher_begins, AT_EDGE, np.where(inside, INSIDE, AS_MARKED))
    match vocabulary.teacher.marks.style:
        case "blank":
            # A teacher's token with a space begins a word. The student's token then shows nothing
            # about the other pieces of the distribution, so the text decides (`starts`).
            return np.where(np.where(shown & ~teacher_begins, edge, starts), AT_EDGE, AS_MARKED)
        case "prefix":
            edge = np.where(shown, edge, starts)
            return np.where(edge == teacher_begins, AS_MARKED, np.where(edge, AT_EDGE, INSIDE))
    return np.where(np.where(shown, edge, starts), AT_EDGE, INSIDE)


def _word_starts(
    text: FlatText, teacher: Tokens, vocabulary: VocabularyMap, tokens: Integers
) -> Booleans:
    """Return which of the teacher's `tokens` [G] begin a word by the rules of the vocabulary that
    marks pieces inside words (the student's if both do): bool [G], false if neither does.

    A token begins a word at the start of the text, and after white space or a character that this
    vocabulary isolates. A space that its piece begins with is part of the token.
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
