"""Flat batches: the characters of many texts and the tokens of many sequences, without padding; the
one error of this package."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teachonce.support.arrays import starts

Integers = NDArray[np.integer[Any]]
Booleans = NDArray[np.bool_]
SOLID, BLANK, IGNORABLE = 0, 1, 2
CODE_POINTS = 0x110000


class AlignmentError(ValueError):
    """Says in one line what is wrong with input that cannot be aligned, and where."""


def character_class(character: str) -> int:
    """Tell how a character counts when spans are compared.

    BLANK: white space. IGNORABLE: what the usual normalisers drop, so that a tokenizer may leave it
    uncovered: control, format, private and unassigned characters (C*), marks (M*: accents,
    variation selectors) and U+FFFD. SOLID: all the rest.
    """
    if character.isspace():
        return BLANK
    dropped = character == "\ufffd" or unicodedata.category(character)[0] in "CM"
    return IGNORABLE if dropped else SOLID


@cache
def _classes() -> NDArray[np.uint8]:
    return np.fromiter(map(character_class, map(chr, range(CODE_POINTS))), np.uint8, CODE_POINTS)


@dataclass(frozen=True, slots=True, eq=False)
class FlatText:
    """Joins B texts into C characters (Unicode code points).

    Text b is characters start[b] ... start[b + 1] - 1.

    start: int64 [B + 1]. codepoints: uint32 [C]. space: bool [C], white space.
    solid: bool [C], neither white space nor ignorable (see `character_class`).
    """

    start: NDArray[np.int64]
    codepoints: NDArray[np.uint32]
    space: Booleans
    solid: Booleans

    @classmethod
    def of(cls, texts: Sequence[str]) -> FlatText:
        start = starts([len(text) for text in texts])
        # surrogatepass: a lone surrogate is one character of a Python string like any other
        raw = "".join(texts).encode("utf-32-le", "surrogatepass")
        codepoints = np.frombuffer(raw, np.dtype("<u4"))
        classes = _classes()[codepoints]
        return cls(start, codepoints, classes == BLANK, classes == SOLID)

    def __len__(self) -> int:
        return len(self.start) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Holds B tokenised sequences as N flat tokens. Sequence b has tokens start[b] ... start[b + 1]
    - 1.

    ids: integers [N]. offsets: integers [N, 2], half-open spans of characters of the token's own
    sequence.
    special: bool [N], tokens that stand for no text (their offsets are not read). start: integers
    [B + 1]. types: integers [N], which of two texts each token is of, or None where there is one.
    Raises AlignmentError when the shapes, the types or `start` do not fit.
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
            raise AlignmentError(f"tokens, start: expected to rise from 0 to the {count} tokens")

    @classmethod
    def of(
        cls,
        ids: Sequence[Sequence[int]],
        offsets: Sequence[Iterable[tuple[int, int]]],
        special: Sequence[Iterable[int]],
    ) -> Tokens:
        """Join one list for each sequence, as a tokenizer gives them (convenient, not fast)."""
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
