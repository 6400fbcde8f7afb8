"""Which map of two vocabularies holds at each place of a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from teachonce.align.mapping import VocabularyMap
from teachonce.align.text import Booleans, FlatText, Integers, Tokens, classes
from teachonce.align.vocabulary import isolated

AS_MARKED, ALL_BEGIN, NONE_BEGINS = 0, 1, 2  # the maps of `VocabularyMap.maps`


def maps_at(
    text: FlatText,
    teacher: Tokens,
    student: Tokens,
    vocabulary: VocabularyMap,
    runs: tuple[Integers, Integers],
) -> NDArray[np.int64]:
    """Return which of `vocabulary.maps` holds for the teacher's distribution at each place: int64
    [G].

    runs: [G] each, flat numbers of the first token of a run, of the teacher and of the student.

    The student's own token shows whether its piece has a mark there, whatever its tokenizer puts in
    front of a text. The teacher's marks hold if its token has the same; if not, all of its pieces
    begin a word there, or none does. If the token does not show it, such as isolated punctuation,
    `_word_starts` decides by the text.
    """
    if len(vocabulary.maps) == 1:
        return np.zeros(len(runs[0]), np.int64)
    own, read = (
        begins[tokens.ids[run]]
        for begins, tokens, run in zip(vocabulary.begins, (teacher, student), runs, strict=True)
    )
    starts = _word_starts(text, teacher, vocabulary, runs[0])
    if vocabulary.student.marks.style == "blank":
        # Right after a letter, WordPiece's `story` means a word after a blank, so its mark is kept.
        # Where a word can begin without a blank, as after a bracket, it means no blank.
        none = ~read & (own | starts)
        return np.where(read & ~own, ALL_BEGIN, np.where(none, NONE_BEGINS, AS_MARKED))
    # A teacher token with a blank begins a word. The student's token there says nothing about the
    # other pieces of the distribution, so their place does.
    shown = vocabulary.student_shows[student.ids[runs[1]]] & ~own
    return np.where(np.where(shown, read, starts), ALL_BEGIN, AS_MARKED)


def _word_starts(
    text: FlatText, teacher: Tokens, vocabulary: VocabularyMap, tokens: Integers
) -> Booleans:
    """Return which `tokens` of the teacher begin a word for the side that marks pieces inside
    words: bool [G], false if neither side does.

    A token begins a word if its place, before its blank if it has one, is the start of the text, or
    follows white space or a character that is a word of this side by itself.
    """
    sides = vocabulary.teacher.marks, vocabulary.student.marks
    inside = [marks for marks in sides if marks.style == "prefix"]
    if not inside:
        return np.zeros(len(tokens), bool)
    low = text.start[np.searchsorted(teacher.start, tokens, "right") - 1]
    place = low + teacher.offsets[tokens, 0]
    # Some tokenizers do not count the blank of a token in its offsets.
    uncounted = ~text.space[place] & (place > low) & text.space[place - 1]
    place -= uncounted & vocabulary.teacher_bytes.blank_first[teacher.ids[tokens]]
    found: Booleans = (place == low) | text.space[place - 1]
    if inside[0].isolates:
        found |= classes(text.codepoints[place - 1], isolated) > 0
    return found
