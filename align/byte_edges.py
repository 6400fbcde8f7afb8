"""The alignment `bytes`: the places in the UTF-8 of a text at which tokens end, and the runs of
tokens between the ends that both tokenizations share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teachonce.align.text import Booleans, FlatText, Tokens, classes, composes_with_previous
from teachonce.align.vocabulary import Vocabulary
from teachonce.support.arrays import ranges, runs_of_equal, starts

Index = NDArray[np.int64]
Octets = NDArray[np.uint8]
BLANK = ord(" ")
# Below every byte position, so that a running maximum of ends ignores it.
NO_EDGE = -1
# At most this many bytes of a letter and its marks are compared. Unicode's stream-safe format
# allows 30 marks.
MOST_BYTES = 128


@dataclass(frozen=True, slots=True, eq=False)
class PieceBytes:
    """Holds the UTF-8 of the V pieces of a vocabulary, with the leading space that a mark such as Ġ
    encodes; special tokens are empty.

    start: int64 [V + 1]. flat: uint8; piece v is flat[start[v] : start[v + 1]]. blanks: int64 [V],
    the number of spaces at the end of each piece. blank_first: bool [V], whether a piece begins
    with a space.
    """

    start: Index
    flat: Octets
    blanks: Index
    blank_first: Booleans

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> PieceBytes:
        # Only the style "blank" marks the start of a word by a byte of the piece, a space.
        blank = vocabulary.marks.style == "blank"
        pairs = zip(vocabulary.pieces, vocabulary.special, strict=True)
        written = [
            b"" if special else b" " * (blank and piece.begins) + piece.text
            for piece, special in pairs
        ]
        blanks = [len(piece) - len(piece.rstrip(b" ")) for piece in written]
        return cls(
            starts([len(piece) for piece in written]),
            np.frombuffer(b"".join(written), np.uint8),
            np.array(blanks, np.int64),
            np.array([piece.startswith(b" ") for piece in written], bool),
        )

    def written(self) -> list[bytes]:
        """Return the bytes of each piece."""
        data = self.flat.tobytes()
        bounds = self.start.tolist()
        return [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class TextBytes:
    """Holds the UTF-8 of B joined texts of C characters, one unused byte after each text.

    of_character: int64 [C + 1], where each character begins. start: int64 [B + 1], where each text
    begins. flat: uint8. The unused byte makes the end of a text and the start of the next two
    different places.
    """

    of_character: Index
    start: Index
    flat: Octets

    @classmethod
    def of(cls, text: FlatText) -> TextBytes:
        points = text.codepoints
        # The bytes of a character follow from its code point, so no character is encoded by itself.
        sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)
        offsets = starts(sizes)
        raw = points.tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")
        begin = offsets[text.start] + np.arange(len(text.start))
        flat = np.zeros(len(raw) + len(text), np.uint8)
        # Without the unused byte, a text would end at the position where the next one starts.
        unused = begin[1:] - 1
        used = np.ones(len(flat), bool)
        used[unused] = False
        flat[used] = np.frombuffer(raw, np.uint8)
        return cls(offsets, begin, flat)


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """Holds the n tokens of one tokenization that are not special or that cover characters.

    number: flat token numbers. ids: token ids. sequence: the number of each token's text. begin:
        the token's first character in the joined texts. reach: the largest end of the token and
        of all tokens before it. final: bool, false if the token shares a character with the next
        token. Each final token ends a group of tokens.
    """

    number: Index
    ids: Index
    sequence: Index
    begin: Index
    reach: Index
    final: Booleans

    @classmethod
    def of(cls, text: FlatText, tokens: Tokens) -> _Counted:
        lengths = np.diff(tokens.start).astype(np.int64)
        begin, end = tokens.offsets.astype(np.int64).T
        number = np.flatnonzero(~tokens.special | (end > begin))
        sequence = np.repeat(np.arange(len(lengths)), lengths)[number]
        shift = text.start[:-1][sequence]
        begin = begin[number] + shift
        # Ascending, even if a token ends before an earlier token does.
        reach = np.maximum.accumulate(end[number] + shift)
        final = np.ones(len(number), bool)
        final[:-1] = (begin[1:] >= reach[:-1]) | (sequence[1:] != sequence[:-1])
        return cls(number, tokens.ids[number].astype(np.int64), sequence, begin, reach, final)

    def last(self) -> Index:
        """Return int64 [n], the index of the final token of each token's group."""
        group = starts(self.final)[:-1]
        tokens: Index = np.flatnonzero(self.final)[group]
        return tokens


def token_ends(text: FlatText, octets: TextBytes, tokens: Tokens, pieces: PieceBytes) -> Index:
    """Find the byte at which each token ends: int64 [N], positions in `octets.flat`, or NO_EDGE.

    A token starts where the previous token ended. So characters that a normaliser dropped, and
    spaces that `trim_offsets` removed, belong to the token after them, or to the token whose piece
    has them. Marks that a normaliser composed with a letter belong to the token of the letter.
    The end is NO_EDGE for special tokens without characters, for tokens that end inside a character
    that a normaliser changed (the pieces have other bytes), and for tokens that end with such a
    letter if other tokens have its marks.
    """
    ends = np.full(len(tokens.ids), NO_EDGE, np.int64)
    counted = _Counted.of(text, tokens)
    if not len(counted.number):
        return ends
    byte = octets.of_character[counted.reach] + counted.sequence
    byte = _untrimmed(byte, octets, pieces.blanks[counted.ids], counted.sequence)
    edges = np.where(counted.final, byte, NO_EDGE)
    if not counted.final.all():
        _inside_characters(edges, counted, octets, pieces)
    _behind_marks(edges, counted, text, octets, pieces)
    ends[counted.number] = edges
    return ends


def _untrimmed(ends: Index, octets: TextBytes, blanks: Index, sequence: Index) -> Index:
    """Return the ends of tokens behind the spaces that end their pieces, if the offsets leave these
    spaces out (`trim_offsets`)."""
    padded = np.flatnonzero(blanks)
    if not len(padded):
        return ends
    end = ends[padded]
    number = np.arange(1, len(octets.flat) + 1)
    # solid[i] is the position behind the last byte up to i that is not a space, so that runs of
    # spaces need no loop.
    solid = np.maximum.accumulate(np.where(octets.flat == BLANK, 0, number))
    spaces = end - np.where(end > 0, solid[end - 1], 0)  # spaces right before the end
    missing = np.maximum(blanks[padded] - spaces, 0)
    behind = end + missing
    # Only if all bytes up to `behind` are spaces; the unused byte after each text is none.
    trimmed = (behind < octets.start[1:][sequence[padded]]) & (solid[behind - 1] <= end)
    extended = ends.copy()
    extended[padded[trimmed]] = behind[trimmed]
    return extended


def _inside_characters(
    edges: Index, counted: _Counted, octets: TextBytes, pieces: PieceBytes
) -> None:
    """Set, in place, the ends of tokens that share a character with the next token.

    The end of a token is the end of its group minus the lengths of the group's later pieces. It is
    used only if these pieces have the same bytes as the text.
    """
    ids, final = counted.ids, counted.final
    size = pieces.start[ids + 1] - pieces.start[ids]
    total = np.cumsum(size)
    last = counted.last()
    ends = edges[last] - (total[last] - total)
    # Tokens after the first of their group: their bytes must equal the text's bytes.
    behind = np.flatnonzero(~final) + 1
    from_text = ranges(ends[behind] - size[behind], size[behind])
    from_piece = ranges(pieces.start[ids[behind]], size[behind])
    # An end that is counted back may lie before the text if a normaliser made characters longer.
    inside = (from_text >= 0) & (from_text < len(octets.flat))
    same = inside & (octets.flat[np.where(inside, from_text, 0)] == pieces.flat[from_piece])
    mismatch = np.zeros(len(ids), np.int64)
    # A special token has no bytes, so nothing is known about where it begins.
    mismatch[behind] = _any(~same, size[behind]) | (size[behind] == 0)
    # An end is used only if no later token of the group mismatches.
    mismatches = np.cumsum(mismatch)
    matching = np.flatnonzero(~final & (mismatches[last] == mismatches))
    # The bytes from the start of a character to an end inside it must be equal, too: `À` and the
    # accent of its decomposed form end with the same byte.
    byte = ends[matching] - counted.sequence[matching]
    character = np.searchsorted(octets.of_character, byte, "right") - 1
    size = byte - octets.of_character[character]
    matching = matching[~_changed(matching, ends[matching], size, ids, octets, pieces)]
    edges[matching] = ends[matching]


def _any(flat: Booleans, sizes: Index) -> Booleans:
    """Return bool [n]: which rows of `flat` have a true value. `sizes` [n] are the row lengths."""
    # Differences of prefix sums: np.add.reduceat would give an empty row its neighbour's value.
    rows: Booleans = np.diff(starts(flat)[starts(sizes)]) > 0
    return rows


def _behind_marks(
    edges: Index, counted: _Counted, text: FlatText, octets: TextBytes, pieces: PieceBytes
) -> None:
    """Set, in place, the ends of tokens that end between a letter and its marks, or between two
    marks, if a normaliser composed or decomposed the letter, or changed the order of the marks.

    The offsets of a composed letter cover the letter without its marks, but the token ends behind
    the marks. If other tokens cover some of the marks, the end of the token is NO_EDGE.
    """
    sequence, reach, stop = counted.sequence, counted.reach, text.start[1:][counted.sequence]
    token = np.flatnonzero(counted.final & (reach < stop))
    token = token[classes(text.codepoints[reach[token]], composes_with_previous) > 0]
    if not len(token):
        return
    bare = np.flatnonzero(classes(text.codepoints, composes_with_previous) == 0)
    bare = np.concatenate([[-1], bare, text.start[-1:]])
    following = np.searchsorted(bare, reach[token])
    letter = np.maximum(bare[following - 1], text.start[sequence[token]])
    size = octets.of_character[reach[token]] - octets.of_character[letter]
    size = np.minimum(size, MOST_BYTES)
    changed = _changed(token, edges[token], size, counted.ids, octets, pieces)
    behind = np.minimum(bare[following], stop[token])
    followed = np.append(sequence[1:] == sequence[:-1], False)[token]
    owns_marks = changed & (~followed | (np.append(counted.begin[1:], 0)[token] >= behind))
    # Ends inside the same group were counted back from this end, so they are wrong as well.
    edges[np.isin(counted.last(), token[changed])] = NO_EDGE
    edges[token[owns_marks]] = (octets.of_character[behind] + sequence[token])[owns_marks]


def _changed(
    token: Index, ends: Index, size: Index, ids: Index, octets: TextBytes, pieces: PieceBytes
) -> Booleans:
    """Return bool [n]: whether the bytes of the pieces up to each `token` [n] differ from the text
    before its end in `ends` [n]. The last `size` [n] bytes are compared. A token without bytes
    gives False."""
    sizes = pieces.start[ids + 1] - pieces.start[ids]
    total = np.cumsum(sizes)
    # The bytes may be in several tokens: these are positions in the bytes of all tokens.
    written = ranges(total[token] - size, size)
    index = np.searchsorted(total, written, "right")
    from_piece = pieces.start[ids[index]] + written - (total[index] - sizes[index])
    from_text = ranges(ends - size, size)
    differs = (written < 0) | (octets.flat[from_text] != pieces.flat[from_piece])
    return _any(differs, size) & (sizes[token] > 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Holds the N tokens of one tokenization, and the bytes where each begins and ends.

    ends: see `token_ends`. begin: int64 [N], the end of the previous token, or the start of the
        text.
    """

    tokens: Tokens
    ends: Index
    begin: Index

    @classmethod
    def of(cls, text: FlatText, octets: TextBytes, tokens: Tokens, pieces: PieceBytes) -> _Side:
        ends = token_ends(text, octets, tokens, pieces)
        lengths = np.diff(tokens.start)
        # The starts of texts ascend, so one running maximum serves all of them.
        edges = np.maximum(ends, np.repeat(octets.start[:-1], lengths))
        begin = np.empty_like(edges)
        begin[1:] = np.maximum.accumulate(edges)[:-1]
        first = tokens.start[:-1][lengths > 0]
        begin[first] = octets.start[:-1][lengths > 0]
        return cls(tokens, ends, begin)

    def runs(self, cuts: Index) -> Index:
        """Return the half-open run of tokens between each position in `cuts` and the next: int64
        [cuts, 2]. A run without tokens or with a special token is empty."""
        text = ~self.tokens.special
        special = self.tokens.special & (self.ends != NO_EDGE)
        between = np.searchsorted(cuts, self.begin, "right") - 1
        runs = np.zeros((len(cuts), 2), np.int64)
        token = np.flatnonzero(text)
        group = between[token]
        first, last = runs_of_equal(group)
        runs[group[first], 0] = token[first]
        runs[group[first], 1] = token[last] + 1
        runs[between[special]] = 0  # a run with a special token does not match its bytes
        return runs


def shared_runs(
    text: FlatText, teacher: Tokens, student: Tokens, pieces: tuple[PieceBytes, PieceBytes]
) -> tuple[Index, Index]:
    """Return the teacher's and the student's runs of tokens, int64 [G, 2] each. Both runs of a pair
    lie between two consecutive bytes at which tokens of both tokenizations end."""
    octets = TextBytes.of(text)
    sides = [
        _Side.of(text, octets, tokens, piece_bytes)
        for tokens, piece_bytes in zip((teacher, student), pieces, strict=True)
    ]
    # Marks over all bytes of the batch: the whole alignment takes 1.7 million teacher tokens a
    # second on one core (RESULTS, Aligning a decoder).
    shared = np.ones(len(octets.flat) + 1, bool)
    for side in sides:
        marked = np.zeros(len(shared), bool)
        marked[side.ends[side.ends != NO_EDGE]] = True
        shared &= marked
    # No token ends at the start of a text, and the first run begins there.
    shared[octets.start] = True
    cuts = np.flatnonzero(shared)
    runs = [side.runs(cuts) for side in sides]
    # The tokens after the last cut of a text have no shared end, so they form no run.
    closed = np.ones(len(cuts), bool)
    closed[np.searchsorted(cuts, octets.start[1:]) - 1] = False
    nonempty = closed & (runs[0][:, 1] > 0) & (runs[1][:, 1] > 0)
    return runs[0][nonempty], runs[1][nonempty]
