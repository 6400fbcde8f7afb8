"""The shapes of students: one entry of `SHAPES` for each kind says how its size is read from
`--student`, and what follows from a shape alone. `model/kinds.py` builds the models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from teachonce.support.errors import UserError
from teachonce.support.plugins import load_outside

TINY = "264x3x12"
BERT_TINY = f"{TINY}x792"  # Kolesnikova et al. 2022, Table 3: 10.4M parameters with 30k pieces
# Inner units by width of the states. A ModernBERT multiplies two halves of them, and has three
# matrices for BERT's two: its `tiny` has as many weights as BERT's.
BERT_INNER, MODERNBERT_INNER = 4, 2
DEFAULT_KIND = "bert"
# The best rate of a transformer falls with its width, the best rate of a BiLSTM does not.
GREATEST_RATE, RATE_TIMES_WIDTH = 4e-3, 0.5
RECURRENT_RATE = 3e-3
STATIC_RATE = 1e-2

Positions = Literal["learnt", "rotary", "none"]


@dataclass(frozen=True)
class Shape:
    """Holds a kind of student and its sizes: `width` of the states and of the word `embeddings`,
    `layers`, and in each attention `heads` and units between the two matrices of its `feed_forward`
    part, both 0 where there is no attention."""

    kind: str
    width: int
    layers: int
    heads: int
    embeddings: int
    feed_forward: int = 0

    @property
    def positions(self) -> Positions:
        """Tell how the student knows where a token stands."""
        return SHAPES[self.kind].positions

    @property
    def token_types(self) -> bool:
        """Tell whether the student has embeddings of token types."""
        return SHAPES[self.kind].token_types

    @property
    def kinds_of_embeddings(self) -> list[str]:
        """Name the embeddings that can be frozen one by one."""
        positions = ["positions"] if self.positions == "learnt" else []
        return ["words", *positions, *(["types"] if self.token_types else [])]

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate where `--lr` gives none."""
        return SHAPES[self.kind].rate(self)


@dataclass(frozen=True)
class ShapeKind:
    """Says what the shapes of one kind of student have in common.

    read: gives the shape for the kind's name and a size as it is written after `KIND:`. It raises
        ValueError for what is no size, with what is wrong, and perhaps the size that was meant.
    positions: whether positions are learnt, rotary, or no part of the model.
    rate: gives the default of the peak learning rate.
    token_types: whether the embeddings have types of tokens: first and second text.
    models: `module:attribute` of the `Kind` of a kind of another package; see `model/kinds.py`.
    """

    read: Callable[[str, str], Shape]
    positions: Positions
    rate: Callable[[Shape], float]
    token_types: bool = False
    models: str = ""


def _transformer(kind: str, size: str, inner: int) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?", size)
    if not found:
        raise ValueError(
            "expected tiny, HxLxA or modernbert:HxLxA (width x layers x heads, such as 264x3x12;"
            " HxLxAxF: units of the feed-forward parts as well), teacher:L (L of its layers),"
            " bilstm:E,H (embeddings, LSTM) or static:D (vectors of word pieces)"
        )
    width, layers, heads = map(int, found.groups()[:3])
    feed_forward = inner * width if found[4] is None else int(found[4])
    if min(width, layers, heads) < 1 or width % heads:
        raise ValueError(
            f"the width {width} must be a multiple of the {heads} heads, and all at least 1"
        )
    if layers > width:
        raise ValueError(
            f"{layers} layers of width {width}; the order is width x layers x heads",
            "x".join((str(layers), str(width), *size.split("x")[2:])),
        )
    if feed_forward < 1:
        raise ValueError(f"feed-forward parts of {feed_forward} units; give at least 1, or HxLxA")
    return Shape(kind, width, layers, heads, width, feed_forward)


def _bert(kind: str, size: str) -> Shape:
    return _transformer(kind, BERT_TINY if size == "tiny" else size, BERT_INNER)


def _rotary(kind: str, size: str) -> Shape:
    shape = _transformer(kind, TINY if size == "tiny" else size, MODERNBERT_INNER)
    each = shape.width // shape.heads
    if each % 2:
        raise ValueError(
            f"{each} dimensions a head; rotary positions need an even number: choose"
            f" {shape.heads * (each + 1)} or fewer heads"
        )
    return shape


def _recurrent(kind: str, size: str) -> Shape:
    found = re.fullmatch(r"(\d+),(\d+)", size)
    embeddings, one_way = map(int, found.groups()) if found else (0, 0)
    if min(embeddings, one_way) < 1:
        raise ValueError(
            "expected E,H, both at least 1 (width of the embeddings and of the LSTM in each"
            " direction, such as 300,600)"
        )
    return Shape(kind, 2 * one_way, 1, 0, embeddings)


def _static(kind: str, size: str) -> Shape:
    if not size.isdecimal() or int(size) < 1:
        raise ValueError("expected the width of its vectors, at least 1, such as static:256")
    return Shape(kind, int(size), 0, 0, int(size))


def _by_width(shape: Shape) -> float:
    return min(GREATEST_RATE, RATE_TIMES_WIDTH / shape.width)


SHAPES = {
    "bert": ShapeKind(_bert, "learnt", _by_width, token_types=True),
    "modernbert": ShapeKind(_rotary, "rotary", _by_width),
    "bilstm": ShapeKind(_recurrent, "none", lambda shape: RECURRENT_RATE),
    "static": ShapeKind(_static, "none", lambda shape: STATIC_RATE),
}
"""By the `model_type` of the student's config; `find_kind` adds those of other packages."""
GROUP = "teachonce.student_kinds"


def find_kind(kind: str, option: str = "--student ") -> ShapeKind | None:
    """Find a kind of student: of this package, of the entry points `teachonce.student_kinds`, or a
    `ShapeKind` that `module:attribute` names. Return None if there is none.

    Raises UserError for code that cannot be imported, or that is no `ShapeKind`.
    """
    if kind not in SHAPES:
        found = load_outside(kind, GROUP, option.rstrip())
        if found is None:
            return None
        if not isinstance(found, ShapeKind):
            raise UserError(f"{option}{kind}: expected a ShapeKind, got {type(found).__name__}")
        SHAPES[kind] = found
    return SHAPES[kind]


def parse_student(student: str, option: str = "--student ", default: str = DEFAULT_KIND) -> Shape:
    """Read the shape that `[KIND:]tiny`, `[KIND:]HxLxA[xF]` or `bilstm:E,H` asks for.

    `option` is what stands before it on the command line, `default` the kind where none is named.
    Raises UserError for anything else.
    """
    named, colon, size = student.rpartition(":")
    kind = named or default
    if (found := find_kind(kind, option)) is None:
        raise UserError(
            f"{option}{student}: no kind of student is called {kind}; there are {', '.join(SHAPES)}"
        )
    try:
        return found.read(kind, size)
    except ValueError as error:
        told, *meant = error.args
        before = option.rpartition(" ")[2] + named + colon  # what the value begins with
        hint = "".join(f": {before}{size}?" for size in meant)
        raise UserError(f"{option}{student}: {told}{hint}") from None
