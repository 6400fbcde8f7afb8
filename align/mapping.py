"""Map the teacher's vocabulary to the student's: equal pieces, and splits into smaller ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from teachonce.align.byte_edges import PieceBytes
from teachonce.align.normalisers import Normaliser, normaliser_of
from teachonce.align.text import Booleans
from teachonce.align.vocabulary import Piece, Vocabulary, isolated
from teachonce.support.arrays import starts

Table = dict[bytes, int]


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Maps each of the teacher's V tokens to student tokens.

    match: int32 [V], the student's id of an equal piece, or -1. Two pieces are equal if they have
        the same text after the student's normaliser and both begin a word, or neither does. Special
        tokens are matched by role (cls, sep, mask, pad, unk), then by name. Several teacher tokens
        may share a match, for instance if the student lower-cases.
    split_start, split_ids: int64 [V + 1] and flat int32. Teacher token t is split into
        split_ids[split_start[t] : split_start[t + 1]], longest piece first from the left. The split
        is empty if the student's normaliser deletes the whole text.
    unknown: bool [V], tokens that the student's pieces cannot spell. Their split is the student's
        unk, or empty if the student has none.
    teacher_bytes, student_bytes: the bytes of both vocabularies' pieces.
    teacher, student: both vocabularies, of which `maps` are made later.
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
        # The alignment `bytes` needs them for every batch, and they depend on the vocabularies
        # alone.
        return cls._made(teacher, student, (PieceBytes.of(teacher), PieceBytes.of(student)))

    @classmethod
    def _made(
        cls,
        teacher: Vocabulary,
        student: Vocabulary,
        octets: tuple[PieceBytes, PieceBytes],
        begins: bool | None = None,
    ) -> VocabularyMap:
        """Make the map of the teacher's pieces as they are marked, or as if each of them begins a
        word, or none does."""
        same_marks = teacher.marks == student.marks and begins is None
        pieces = _StudentPieces(student, same_marks)
        # With equal normalisers, the teacher's pieces are normalised already.
        same = teacher.normaliser == student.normaliser
        normalise = str if same else normaliser_of(student.normaliser)
        match = np.full(len(teacher), -1, np.int32)
        splits: list[list[int]] = []
        unknown = np.zeros(len(teacher), bool)
        for number, token in enumerate(teacher.tokens):
            split = None
            if teacher.special[number]:
                match[number] = pieces.special(number, teacher)
            elif token:
                piece = teacher.pieces[number]
                if begins is not None:
                    piece = replace(piece, begins=begins, free=False)
                piece = _normalised(piece, normalise)
                match[number] = pieces.find(token, piece)
                split = pieces.split(piece) if match[number] < 0 else None
            if match[number] >= 0:
                split = [int(match[number])]
            unknown[number] = split is None
            splits.append(_unk_ids(student) if split is None else split)
        start = starts([len(split) for split in splits])
        ids = np.array([i for split in splits for i in split], np.int32)
        return cls(match, start, ids, unknown, *octets, teacher, student)

    @cached_property
    def maps(self) -> tuple[VocabularyMap, ...]:
        """Return this map, then the maps for places at which the teacher's marks do not hold for
        the student: where every piece begins a word, and where none does. `align.places.maps_at`
        finds the map of each place.

        A byte-level tokenizer has one piece ` story` after a blank, and another one, `story`, both
        in `(story)` and inside `history`. WordPiece has `story` after a blank and in `(story)`, and
        `##story` inside `history`. So between these two the piece depends on the place. It does
        between two vocabularies that mark blanks as well, unless they have one tokenizer: only one
        of them may put a blank in front of a text. Between others, this is the only map.
        """
        # Made when an alignment needs them: that of decoders, `bytes`, never does.
        match self.teacher.marks.style, self.student.marks.style:
            case "blank", "prefix":
                return self, self._where(begins=True)
            case _, "blank" if not self.teacher.reads_as(self.student):
                return self, self._where(begins=True), self._where(begins=False)
        return (self,)

    def _where(self, begins: bool) -> VocabularyMap:
        octets = self.teacher_bytes, self.student_bytes
        return self._made(self.teacher, self.student, octets, begins)

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
    def student_shows(self) -> Booleans:
        """Return which student tokens show whether they begin a word: bool [V]. Isolated
        punctuation and special tokens do not."""
        free = np.array([piece.free for piece in self.student.pieces], bool)
        return ~(free | self.student.special)

    def split(self, token: int) -> NDArray[np.int32]:
        """Return the student ids of one teacher token."""
        return self.split_ids[self.split_start[token] : self.split_start[token + 1]]


def _unk_ids(student: Vocabulary) -> list[int]:
    return [student.roles["unk"]] if "unk" in student.roles else []


def _normalised(piece: Piece, normalise: Normaliser) -> Piece:
    """Normalise a piece as the student does. A byte-level piece that is not UTF-8 is returned
    unchanged: it holds part of a character."""
    try:
        text = normalise(piece.text.decode()).encode()
    except UnicodeDecodeError:
        return piece
    return Piece(text, piece.begins, piece.marked, piece.free)


class _StudentPieces:
    """Looks up the student's tokens: special ones by role or name, ordinary pieces by text."""

    def __init__(self, student: Vocabulary, same_marks: bool) -> None:
        self.style = student.marks.style
        self.isolates = self.style == "prefix" and student.marks.isolates
        self.same_marks = same_marks
        self.student = student
        self.specials = {student.tokens[i]: int(i) for i in np.flatnonzero(student.special)}
        self.tokens: dict[str, int] = {}
        self.exact: dict[tuple[bytes, bool], int] = {}
        plain: Table = {}
        marked: Table = {}
        ordinary = [i for i, token in enumerate(student.tokens) if token and not student.special[i]]
        # If two tokens have the same text, tokenizers prefer the free piece (`.` over `##.`), then
        # the marked suffix; they use `<0x41>` only if nothing else fits.
        ordinary.sort(key=lambda i: self._rank(student.tokens[i], student.pieces[i]))
        for number in ordinary:
            token, piece = student.tokens[number], student.pieces[number]
            self.tokens[token] = number
            self.exact.setdefault((piece.text, piece.begins), number)
            if self.style == "blank":
                plain.setdefault((b" " if piece.begins else b"") + piece.text, number)
            else:
                (marked if piece.marked else plain).setdefault(piece.text, number)
        for number in ordinary:
            piece = student.pieces[number]
            if piece.free:
                self.exact.setdefault((piece.text, not piece.begins), number)
        first = rest = last = only = plain
        if self.style == "prefix":
            rest = last = marked
        elif self.style == "suffix":
            last = only = {**plain, **marked}
        self.tables = {
            (True, False): first,
            (False, False): rest,
            (False, True): last,
            (True, True): only,
        }
        self.longest = max(map(len, (*plain, *marked)), default=0)

    def _rank(self, token: str, piece: Piece) -> tuple[bool, bool, bool]:
        raw = token.startswith("<0x") and len(piece.text) == 1
        return raw, not piece.free, self.style == "suffix" and not piece.marked

    def special(self, number: int, teacher: Vocabulary) -> int:
        """Return the student's id for a special token of the teacher, or -1."""
        # By role first: [CLS] of one vocabulary is <s> of another.
        for role, own in teacher.roles.items():
            if own == number and role in self.student.roles:
                return self.student.roles[role]
        return self.specials.get(teacher.tokens[number], -1)

    def find(self, token: str, piece: Piece) -> int:
        """Return the student's id of an equal piece, or -1."""
        # With equal marks, the same token means the same piece.
        own = self.tokens.get(token, -1) if self.same_marks else -1
        if own >= 0 and self.student.pieces[own].text == piece.text:
            return own
        number = self.exact.get((piece.text, piece.begins), -1)
        if number < 0 and piece.free:
            number = self.exact.get((piece.text, not piece.begins), -1)
        return number

    def split(self, piece: Piece) -> list[int] | None:
        """Spell the piece in the student's pieces; None if they cannot spell it."""
        likely = self._split(piece.text, piece.begins)
        if likely is None and (piece.free or (piece.begins and self.style == "blank")):
            return self._split(piece.text, not piece.begins)
        return likely

    def _split(self, text: bytes, begins: bool) -> list[int] | None:
        if self.style == "blank":
            return self._greedy((b" " if begins else b"") + text, True)
        ids: list[int] = []
        # The student's pre-tokenizer never gives its model two words at once, though a teacher's
        # piece may hold several.
        for word, begins_one in _words(text, begins, self.isolates):
            pieces = self._greedy(word, begins_one or self.style != "prefix")
            if pieces is None:
                return None
            ids += pieces
        return ids

    def _greedy(self, word: bytes, starts: bool) -> list[int] | None:
        ids: list[int] = []
        begin = 0
        while begin < len(word):
            first = starts and begin == 0
            # Bounded by the longest piece: otherwise a teacher's token of n bytes would take n^2
            # lookups.
            for end in range(min(len(word), begin + self.longest), begin, -1):
                number = self.tables[first, end == len(word)].get(word[begin:end], -1)
                if number >= 0:
                    break
            else:
                return None
            ids.append(number)
            begin = end
        return ids


def _words(text: bytes, begins: bool, isolates: bool) -> list[tuple[bytes, bool]]:
    """Split a piece's text into (word, begins a word); only the first may continue a word."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        # Part of a character has neither blanks nor punctuation.
        return [(text, begins)]
    # BERT's pre-tokenizer makes a word of each of these, whatever is next to them.
    if isolates:
        characters = "".join(f" {c} " if isolated(c) else c for c in characters)
    words = [word.encode() for word in characters.split()]
    return [(word, begins or i > 0 or characters[:1].isspace()) for i, word in enumerate(words)]
