"""Map the teacher's vocabulary to the student's: equal pieces, and splits into smaller ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from teachonce.align.byte_edges import PieceBytes
from teachonce.align.normalisers import Normaliser, normaliser_of
from teachonce.align.text import Booleans
from teachonce.align.vocabulary import Piece, Vocabulary, divides, isolation
from teachonce.support.arrays import starts

Table = dict[bytes, int]


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Maps each of the teacher's V tokens to student tokens.

    match: int32 [V], the student's id of an equal piece, or -1. Two pieces are equal if they have
        the same text after the student's normaliser and both begin a word, or neither does (both
        end a word, or neither does, if the student marks ends). Special tokens are matched by role
        (cls, sep, mask, pad, unk), then by name. Several teacher tokens may share a match, for
        instance if the student lower-cases.
    split_start, split_ids: int64 [V + 1] and flat int32. Teacher token t is split into
        split_ids[split_start[t] : split_start[t + 1]], longest piece first from the left. The split
        is empty if the student's normaliser deletes the whole text.
    unknown: bool [V], tokens that the student's pieces cannot spell. Their split is the student's
        unk, or empty if the student has none.
    teacher_bytes, student_bytes: the bytes of both vocabularies' pieces.
    teacher, student: both vocabularies, from which `maps` makes further maps.
    """

    match: NDArray[np.int32]
    split_start: NDArray[np.int64]
    split_ids: NDArray[np.int32]
    unknown: Booleans
    teacher_bytes: PieceBytes
    student_bytes: PieceBytes
    teacher: Vocabulary
    student: Vocabulary

    @classmethod
    def between(cls, teacher: Vocabulary, student: Vocabulary) -> VocabularyMap:
        """Make the map of two vocabularies. This is slow, so do it once for each pair."""
        # Made once: the alignment `bytes` needs them for every batch.
        return cls._build(teacher, student, (PieceBytes.of(teacher), PieceBytes.of(student)))

    @classmethod
    def _build(
        cls,
        teacher: Vocabulary,
        student: Vocabulary,
        octets: tuple[PieceBytes, PieceBytes],
        edge: bool | None = None,
    ) -> VocabularyMap:
        """Make a map of the teacher's pieces.

        edge: None reads the teacher's own marks. True makes the map for the edges of words, False
            the map for all other places (see `maps`).
        """
        pieces = _StudentPieces(student, teacher, edge)
        # With equal normalisers, the teacher's pieces are normalised already.
        same = teacher.normaliser == student.normaliser
        normalise = str if same else normaliser_of(student.normaliser)
        match = np.full(len(teacher), -1, np.int32)
        splits: list[list[int]] = []
        unk = [student.roles["unk"]] if "unk" in student.roles else []
        unknown = np.zeros(len(teacher), bool)
        for number, token in enumerate(teacher.tokens):
            split = None
            if teacher.special[number]:
                match[number] = pieces.special(number)
            elif token:
                text = _normalised(teacher.pieces[number].text, normalise)
                match[number] = pieces.find(number, text)
                split = pieces.split(number, text) if match[number] < 0 else None
            if match[number] >= 0:
                split = [int(match[number])]
            unknown[number] = split is None
            splits.append(unk if split is None else split)
        start = starts([len(split) for split in splits])
        ids = np.array([i for split in splits for i in split], np.int32)
        return cls(match, start, ids, unknown, *octets, teacher, student)

    @cached_property
    def maps(self) -> tuple[VocabularyMap, ...]:
        """Return this map, then a map for the edge of a word that the student marks (its end if the
        student has suffixes, else its start), then a map for all other places. The second and third
        map apply where the student's mark must differ from the teacher's; they are left out if no
        place needs them. `align.places.maps_at` chooses the map for each place.

        Vocabularies mark the same places by different rules. A byte-level tokenizer has ` story`
        after a space, and `story` both in `(story)` and inside `history`. WordPiece has `story`
        after a space and in `(story)`, and `##story` inside `history`. A vocabulary of suffixes has
        `story</w>` in these three, and `story` in `storyteller`. Two WordPieces differ if only one
        isolates Chinese. Two vocabularies that mark spaces differ, unless they have one tokenizer:
        only one of them may put a space in front of a text.
        """
        # Not made with this map: `bytes`, the alignment of decoders, never needs them.
        teacher, student = self.teacher.marks, self.student.marks
        match teacher.style, student.style:
            case "blank", "prefix":
                return self, self._where(True)
            case _, "blank" | "suffix" if not self.teacher.reads_as(self.student):
                return self, self._where(True), self._where(False)
            case _, "prefix" if teacher != student:
                return self, self._where(True), self._where(False)
        return (self,)

    def _where(self, edge: bool) -> VocabularyMap:
        return self._build(
            self.teacher, self.student, (self.teacher_bytes, self.student_bytes), edge
        )

    @cached_property
    def begins(self) -> tuple[Booleans, Booleans]:
        """Return which tokens begin a word by their own marks: bool [V] of the teacher and of the
        student."""
        teacher, student = (
            np.array([piece.begins for piece in side.pieces], bool)
            for side in (self.teacher, self.student)
        )
        return teacher, student

    @cached_property
    def teacher_ends(self) -> Booleans:
        """Return which tokens of the teacher have the mark of a word's end: bool [Vt]."""
        return np.array([piece.marked for piece in self.teacher.pieces], bool)

    @cached_property
    def student_edges(self) -> tuple[Booleans, Booleans]:
        """Return which tokens of the student are at the edge of a word that the student marks (see
        `maps`), and which tokens show by their marks whether they are: bool [Vs] each. Isolated
        punctuation and special tokens do not show it."""
        suffix, pieces = self.student.marks.style == "suffix", self.student.pieces
        edge = np.array([_edge_of(piece, suffix) for piece in pieces], bool)
        free = np.array([piece.free and not suffix for piece in pieces], bool)
        return edge, ~(free | self.student.special)

    def split(self, token: int) -> NDArray[np.int32]:
        """Return the student ids of one teacher token."""
        return self.split_ids[self.split_start[token] : self.split_start[token + 1]]


def _edge_of(piece: Piece, suffix: bool) -> bool:
    return piece.marked if suffix else piece.begins


def _normalised(text: bytes, normalise: Normaliser) -> bytes:
    """Normalise a piece's text as the student does. Bytes that are not UTF-8 are returned
    unchanged: they hold part of a character."""
    try:
        return normalise(text.decode()).encode()
    except UnicodeDecodeError:
        return text


class _StudentPieces:
    """Looks up the student's token for a teacher's token: special tokens by role or name, ordinary
    pieces by text and edge (see `VocabularyMap.maps`)."""

    def __init__(self, student: Vocabulary, teacher: Vocabulary, edge: bool | None) -> None:
        self.style = student.marks.style
        self.same_marks = teacher.marks == student.marks and edge is None
        self.student, self.teacher, self.edge = student, teacher, edge
        self.specials = {student.tokens[i]: int(i) for i in np.flatnonzero(student.special)}
        self.tokens: dict[str, int] = {}
        self.exact: dict[tuple[bytes, bool], int] = {}
        plain: Table = {}
        marked: Table = {}
        ordinary = [i for i, token in enumerate(student.tokens) if token and not student.special[i]]

        def rank(number: int) -> tuple[bool, bool]:
            piece = student.pieces[number]
            return student.tokens[number].startswith("<0x") and len(piece.text) == 1, not piece.free

        # If two tokens have the same text, tokenizers prefer the free piece (`.` over `##.`); they
        # use `<0x41>` only if nothing else fits.
        ordinary.sort(key=rank)
        suffix = self.style == "suffix"
        for number in ordinary:
            token, piece = student.tokens[number], student.pieces[number]
            self.tokens[token] = number
            self.exact.setdefault((piece.text, _edge_of(piece, suffix)), number)
            if self.style == "blank":
                plain.setdefault((b" " if piece.begins else b"") + piece.text, number)
            else:
                (marked if piece.marked else plain).setdefault(piece.text, number)
        for number in ordinary:
            piece = student.pieces[number]
            if piece.free and not suffix:
                self.exact.setdefault((piece.text, not piece.begins), number)
        # Keys: whether the text is at the start of a word, and whether it is at the end of one.
        self.tables = dict.fromkeys(product((False, True), repeat=2), plain)
        if self.style == "prefix":
            self.tables[False, False] = self.tables[False, True] = marked
        elif suffix:
            self.tables[False, True] = self.tables[True, True] = {**plain, **marked}
        self.longest = max(map(len, (*plain, *marked)), default=0)

    def _edge(self, piece: Piece, text: bytes) -> tuple[bool, bool]:
        """Return whether a teacher's piece, normalised to `text`, is at the edge of a word, and
        whether this is a guess: then it may also be the other way."""
        if self.style == "suffix" and _ends_alone(text, self.student.marks.isolates):
            return True, False
        if self.edge is not None:
            return self.edge, False
        if self.style == "suffix":
            unmarked = self.teacher.marks.style != "suffix"
            return piece.marked or unmarked, unmarked
        return piece.begins, piece.free

    def special(self, number: int) -> int:
        """Return the student's id for a special token of the teacher, or -1."""
        # By role first: [CLS] of one vocabulary is <s> of another.
        for role, token_id in self.teacher.roles.items():
            if token_id == number and role in self.student.roles:
                return self.student.roles[role]
        return self.specials.get(self.teacher.tokens[number], -1)

    def find(self, number: int, text: bytes) -> int:
        """Return the student's id of a piece equal to the teacher's piece `number`, whose
        normalised text is `text`, or -1."""
        # With equal marks, the same token means the same piece.
        same = self.tokens.get(self.teacher.tokens[number], -1) if self.same_marks else -1
        if same >= 0 and self.student.pieces[same].text == text:
            return same
        edge, guessed = self._edge(self.teacher.pieces[number], text)
        match = self.exact.get((text, edge), -1)
        return self.exact.get((text, not edge), -1) if match < 0 and guessed else match

    def split(self, number: int, text: bytes) -> list[int] | None:
        """Spell the teacher's piece `number`, whose normalised text is `text`, in the student's
        pieces; None if they cannot spell it."""
        edge, guessed = self._edge(self.teacher.pieces[number], text)
        likely = self._split(text, edge)
        if likely is None and (guessed or (edge and self.style == "blank")):
            return self._split(text, not edge)
        return likely

    def _split(self, text: bytes, edge: bool) -> list[int] | None:
        if self.style == "blank":
            return self._greedy((b" " if edge else b"") + text, (True, True))
        ids: list[int] = []
        # The student's pre-tokenizer never gives its model two words at once, though a teacher's
        # piece may hold several.
        words = _words(text, edge or self.style != "prefix", self.student.marks.isolates)
        for number, (word, begins) in enumerate(words, 1):
            ends = edge or self.style != "suffix" or number < len(words)
            pieces = self._greedy(word, (begins, ends))
            if pieces is None:
                return None
            ids += pieces
        return ids

    def _greedy(self, text: bytes, edges: tuple[bool, bool]) -> list[int] | None:
        """Spell a text in the student's pieces, the longest first; None if they cannot spell it.
        `edges`: whether the text starts a word, and whether it ends one."""
        ids: list[int] = []
        begin = 0
        while begin < len(text):
            first = edges[0] and begin == 0
            # Bounded by the longest piece: otherwise a teacher's token of n bytes would take n^2
            # lookups.
            for end in range(min(len(text), begin + self.longest), begin, -1):
                number = self.tables[first, edges[1] and end == len(text)].get(text[begin:end], -1)
                if number >= 0:
                    break
            else:
                return None
            ids.append(number)
            begin = end
        return ids


def _ends_alone(text: bytes, isolates: int) -> bool:
    """Return whether a piece ends with an isolated character, so that a word ends there."""
    last = text[-4:].decode(errors="replace")[-1:]
    return bool(last and isolation(last) & isolates)


def _words(text: bytes, begins: bool, isolates: int) -> list[tuple[bytes, bool]]:
    """Split a piece's text into words, each with whether it begins in this piece. If `begins` is
    False, the first word may have begun before the piece."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        # Part of a character has neither spaces nor punctuation.
        return [(text, begins)]
    flags = [isolation(character) & isolates for character in characters]
    ends = [*map(divides, flags, flags[1:]), False]
    divided = "".join(c + " " * end for c, end in zip(characters, ends, strict=False))
    words = [word.encode() for word in divided.split()]
    # An isolated character begins a word, whatever is before it.
    return [
        (word, begins or i > 0 or characters[:1].isspace() or flags[0] > 0)
        for i, word in enumerate(words)
    ]
