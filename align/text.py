"""Flat batches: the characters of B texts and the tokens of B sequences, without padding.

Also defines AlignmentError, the error of this package.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teachonce.support.arrays import starts

Integers = NDArray[np.integer[Any]]
Booleans = NDArray[np.bool_]
SOLID, BLANK, IGNORABLE, UNSEEN = 0, 1, 2, 3
CODE_POINTS = 0x110000


class AlignmentError(ValueError):
    """Raised for input that cannot be aligned; the message is one line."""


def character_class(character: str) -> int:
    """Return the class of a character, by which spans are compared.

    BLANK: white space.
    IGNORABLE: characters that the usual normalisers drop, so that a tokenizer may leave them
        uncovered: control, format, private and unassigned ones (C*), marks (M*: accents, variation
        selectors) and U+FFFD.
    SOLID: all others.
    """
    if character.isspace():
        return BLANK
    dropped = character == "\ufffd" or unicodedata.category(character)[0] in "CM"
    return IGNORABLE if dropped else SOLID


def composes_with_previous(character: str) -> bool:
    """Return whether a normaliser may compose a character with the character before it. Such are
    marks, vowels and finals of decomposed Hangul, and halfwidth voiced sound marks."""
    if "\u1160" <= character <= "\u11ff" or character in "\uff9e\uff9f":
        return True
    return unicodedata.category(character)[0] == "M"


@cache
def _table(classify: Callable[[str], int]) -> NDArray[np.uint8]:
    """Return the table of classes by code point (1.1 MB), with UNSEEN where no text had it yet.

    `classify` is only the key of the cache: each function has a table of its own.
    """
    return np.full(CODE_POINTS, UNSEEN, np.uint8)


def classes(
    codepoints: NDArray[np.uint32], classify: Callable[[str], int] = character_class
) -> NDArray[np.uint8]:
    """Return the class of each character: what `classify` returns for it.

    `classify` must be a module-level function: a table is cached for each.
    """
    # `unicodedata` is called once for a code point: not for every character of every batch, and not
    # for the million that no text has, which took each process half a second.
    table = _table(classify)
    kinds = table[codepoints]
    unseen = np.unique(codepoints[kinds == UNSEEN])
    if len(unseen):
        table[unseen] = [classify(chr(point)) for point in unseen.tolist()]
        kinds = table[codepoints]
    return kinds


@dataclass(frozen=True, slots=True, eq=False)
class FlatText:
    """Joins B texts into C characters (Unicode code points).

    start: int64 [B + 1]; text b is characters start[b] ... start[b + 1] - 1.
    codepoints: uint32 [C].
    space: bool [C], white space.
    solid: bool [C], neither white space nor ignorable (see `character_class`).
    """

    start: NDArray[np.int64]
    codepoints: NDArray[np.uint32]
    space: Booleans
    solid: Booleans

    @classmethod
    def of(cls, texts: Sequence[str]) -> FlatText:
        """Join the characters of texts."""
        start = starts([len(text) for text in texts])
        # surrogatepass: a lone surrogate is one character of a Python string like any other
        raw = "".join(texts).encode("utf-32-le", "surrogatepass")
        codepoints = np.frombuffer(raw, np.dtype("<u4"))
        kinds = classes(codepoints)
        return cls(start, codepoints, kinds == BLANK, kinds == SOLID)

    def __len__(self) -> int:
        return len(self.start) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Holds B tokenized sequences as N flat tokens.

    ids: integers [N].
    offsets: integers [N, 2], half-open spans of characters of the token's own sequence.
    special: bool [N], tokens that cover no text; their offsets are ignored.
    start: integers [B + 1]; sequence b has tokens start[b] ... start[b + 1] - 1.
    types: integers [N], 0 or 1: the text of a pair that the token belongs to. None for single
        texts.

    Raises AlignmentError if shapes, dtypes or `start` are wrong.
    """

    ids: Integers
    offsets: Integers
    special: Booleans
    start: Integers
    types: Integers | None = None

    def __post_init__(self) -> None:
        count = len(self.ids)
        for name, array, shape, kinds in (
            ("ids", self.ids, (count,), "iu"),
            ("offsets", self.offsets, (count, 2), "iu"),
            ("special", self.special, (count,), "b"),
            ("start", self.start, (len(self.start),), "iu"),
            ("types", self.ids if self.types is None else self.types, (count,), "iu"),
        ):
            if array.shape != shape or array.dtype.kind not in kinds:
                kind = "bool" if kinds == "b" else "integers"
                raise AlignmentError(
                    f"tokens, {name}: expected {kind} {list(shape)}, "
                    f"got {array.dtype} {list(array.shape)}"
                )
        start = self.start.astype(np.int64)
        if not len(start) or start[0] != 0 or start[-1] != count or (np.diff(start) < 0).any():
            raise AlignmentError(
                f"tokens, start: expected ascending numbers from 0 to {count}, the number of tokens"
            )

    @classmethod
    def of(
        cls,
        ids: Sequence[Sequence[int]],
        offsets: Sequence[Iterable[tuple[int, int]]],
        special: Sequence[Iterable[int]],
    ) -> Tokens:
        """Join one list for each sequence, as a tokenizer returns them. Convenient, not fast."""
        spans = np.array(list(chain.from_iterable(offsets)), np.int32).reshape(-1, 2)
        return cls(
            np.array(list(chain.from_iterable(ids)), np.uint32),
            spans,
            np.array(list(chain.from_iterable(special)), bool),
            starts([len(sequence) for sequence in ids]),
        )

    def __len__(self) -> int:
        return len(self.start) - 1

    def sequence_of(self, token: int) -> int:
        """Return the number of the sequence that holds a flat token."""
        return int(np.searchsorted(self.start, token, "right")) - 1
