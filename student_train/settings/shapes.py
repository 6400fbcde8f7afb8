"""The shapes of students: `SHAPES` has an entry for each kind, which parses its size from
`--student`. `model/kinds.py` builds the models."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from teachonce.support.errors import UserError, suggest, suggest_path
from teachonce.support.packages import load_outside

TINY = "264x3x12"
BERT_TINY = f"{TINY}x792"  # Kolesnikova et al. 2022, Table 3: 10.4M parameters with 30k pieces
# Feed-forward size divided by hidden size. A ModernBERT's gated feed-forward part has three
# matrices for BERT's two; with a factor of 2 its `tiny` has the same number of weights as BERT's.
BERT_INNER, MODERNBERT_INNER = 4, 2
# Parts of speech, BERT and ModernBERT of 128x2x2: accuracy .78 and .82 in English, .68 and .78 in
# Russian (RESULTS, "BERT or ModernBERT").
DEFAULT_KIND = "modernbert"
"""The kind of a shape that names none. It measures best; see docs/defaults.md."""
SCRATCH = "scratch:"
"""The prefix of a model with random weights in `downstream --model`."""
# These replace `teacher:L` and a folder by a shape before they parse it.
OF_MODEL = (
    "only student-train, run and StudentBatches look up the shape of a model; give the shape"
    " itself, such as bert:256x4x4"
)
# The best learning rate of a transformer falls with its hidden size; a BiLSTM's does not.
LARGEST_RATE, RATE_TIMES_WIDTH = 4e-3, 0.5
RECURRENT_RATE = 3e-3
STATIC_RATE = 1e-2

Positions = Literal["learnt", "rotary", "none"]


@dataclass(frozen=True)
class Shape:
    """Holds a kind of student and its sizes.

    width: the hidden size.
    embeddings: the size of a word embedding.
    heads, feed_forward: attention heads and feed-forward size; 0 for a kind without attention.
    head_size: the size of a head, width / heads unless it is given.
    """

    kind: str
    width: int
    layers: int
    heads: int
    embeddings: int
    feed_forward: int = 0
    key_value_heads: int = 0
    head_size: int = 0

    def __post_init__(self) -> None:
        # Set here, so that a shape that gives the default size equals the shape that leaves it out.
        if self.heads and not self.head_size:
            object.__setattr__(self, "head_size", self.width // self.heads)

    @property
    def causal(self) -> bool:
        """Return whether the student is a decoder: each token attends to earlier ones only."""
        return SHAPES[self.kind].causal

    @property
    def family(self) -> str:
        """Return the family of a decoder's byte-level vocabulary, or "" for another student."""
        return SHAPES[self.kind].family

    @property
    def positions(self) -> Positions:
        """Return how the student encodes positions."""
        return SHAPES[self.kind].positions

    @property
    def token_types(self) -> bool:
        """Return whether the student has token type embeddings."""
        return SHAPES[self.kind].token_types

    @property
    def kinds_of_embeddings(self) -> list[str]:
        """List the embeddings that can be frozen separately."""
        positions = ["positions"] if self.positions == "learnt" else []
        return ["words", *positions, *(["types"] if self.token_types else [])]

    @property
    def learning_rate(self) -> float:
        """Return the default of `--lr`."""
        return SHAPES[self.kind].rate(self)


@dataclass(frozen=True)
class ShapeKind:
    """Describes the shapes of one kind of student.

    read: parses a shape from the kind's name and the size, as written after `KIND:`. Raises
        ValueError with what is wrong and, as a second argument, the size that was probably meant.
    positions: learnt, rotary, or none.
    rate: returns the default peak learning rate of a shape.
    token_types: whether there are token type embeddings (first and second text).
    causal: whether it is a decoder, trained on next tokens.
    family: for a decoder, the family of its byte-level vocabulary (`training/byte_level.py`).
    models: for a kind of another package, `module:attribute` of its `ModelKind` (`model/kinds.py`).
    """

    read: Callable[[str, str], Shape]
    positions: Positions
    rate: Callable[[Shape], float]
    token_types: bool = False
    causal: bool = False
    family: str = ""
    models: str = ""


def _transformer(kind: str, size: str, inner: int, head_size: int = 0) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?", size)
    if not match:
        raise ValueError(
            "expected tiny, HxLxA or bert:HxLxA (hidden size x layers x heads, such as"
            " 264x3x12; HxLxAxF: feed-forward size as well), llama:HxLxA, qwen2:HxLxA, qwen3:HxLxA"
            " or gpt2:HxLxA (decoders), teacher:L (L of its layers), bilstm:E,H (embeddings, LSTM),"
            " static:D (vectors of word pieces), or the folder of a model"
        )
    width, layers, heads = map(int, match.groups()[:3])
    feed_forward = inner * width if match[4] is None else int(match[4])
    # transformers requires it of a Llama even if the size of its heads is given.
    multiple = not head_size or kind == "llama"
    if min(width, layers, heads) < 1 or (multiple and width % heads):
        raise ValueError(
            f"the hidden size {width} must be a multiple of the {heads} heads, and all at least 1"
        )
    if layers > width:
        raise ValueError(
            f"{layers} layers of hidden size {width}; the order is hidden size x layers x heads",
            "x".join((str(layers), str(width), *size.split("x")[2:])),
        )
    if feed_forward < 1:
        raise ValueError(f"feed-forward size {feed_forward}; give at least 1, or HxLxA")
    return Shape(kind, width, layers, heads, width, feed_forward, head_size=head_size)


def _bert(kind: str, size: str) -> Shape:
    return _transformer(kind, BERT_TINY if size == "tiny" else size, BERT_INNER)


def _modernbert(kind: str, size: str) -> Shape:
    return _even(_transformer(kind, TINY if size == "tiny" else size, MODERNBERT_INNER))


def _even(shape: Shape) -> Shape:
    """Return the shape of a student with rotary positions. Raises ValueError for odd heads."""
    size = shape.head_size
    if size % 2:
        raise ValueError(
            f"{size} dimensions per head; rotary positions need an even number: choose hidden size"
            f" {shape.heads * (size + 1)}, or fewer heads"
        )
    return shape


def _recurrent(kind: str, size: str) -> Shape:
    match = re.fullmatch(r"(\d+),(\d+)", size)
    embeddings, one_way = map(int, match.groups()) if match else (0, 0)
    if min(embeddings, one_way) < 1:
        raise ValueError(
            "expected E,H, both at least 1 (embedding size, and LSTM size in each direction, such"
            " as 300,600)"
        )
    return Shape(kind, 2 * one_way, 1, 0, embeddings)


def _static(kind: str, size: str) -> Shape:
    if not size.isdecimal() or int(size) < 1:
        raise ValueError("expected the size of its vectors, at least 1, such as static:256")
    return Shape(kind, int(size), 0, 0, int(size))


def _decoder(kind: str, size: str, inner: Callable[[int], int], grouped: bool) -> Shape:
    match = re.fullmatch(r"(\d+x\d+x\d+)(?:x(\d+))?(?:x(\d+))?(?:x(\d+))?", size)
    if not match or (match[3] and not grouped):
        form = "HxLxA[xF[xKV[xD]]]" if grouped else "HxLxA[xF]"
        about = "hidden size x layers x heads, feed-forward size"
        about += ", key-value heads, size of a head" if grouped else ""
        raise ValueError(f"expected {form} ({about}), such as {kind}:256x4x4")
    head_size = int(match[4] or 0)
    if match[4] and (not head_size or head_size % 2):
        even = head_size + 2 - head_size % 2
        raise ValueError(
            f"heads of size {head_size}; rotary positions need an even number, such as {even}"
        )
    # The factor 1 is replaced below by the feed-forward size of the kind.
    shape = _transformer(kind, match[1], 1, head_size)
    key_value_heads = int(match[3] or shape.heads)
    feed_forward = int(match[2] or inner(shape.width))
    if key_value_heads < 1 or shape.heads % key_value_heads:
        raise ValueError(
            f"{shape.heads} heads are not a multiple of {key_value_heads} key-value heads"
        )
    if feed_forward < 1:
        raise ValueError(f"feed-forward size {feed_forward}; give at least 1, or HxLxA")
    return replace(shape, feed_forward=feed_forward, key_value_heads=key_value_heads)


def _gated(width: int) -> int:
    """Return the feed-forward size of a gated layer: two thirds of four times the width, in steps
    of eight.

    It then has as many weights as a layer without gate (Shazeer 2020,
    https://arxiv.org/abs/2002.05202).
    """
    return max(8, round(width / 3) * 8)


def _gpt2(kind: str, size: str) -> Shape:
    return _decoder(kind, size, lambda width: 4 * width, grouped=False)


def _llama(kind: str, size: str) -> Shape:
    return _even(_decoder(kind, size, _gated, grouped=True))


def _by_width(shape: Shape) -> float:
    return min(LARGEST_RATE, RATE_TIMES_WIDTH / shape.width)


SHAPES = {
    "bert": ShapeKind(_bert, "learnt", _by_width, token_types=True),
    "modernbert": ShapeKind(_modernbert, "rotary", _by_width),
    "gpt2": ShapeKind(_gpt2, "learnt", _by_width, causal=True, family="gpt-2"),
    "llama": ShapeKind(_llama, "rotary", _by_width, causal=True, family="llama-bpe"),
    "qwen2": ShapeKind(_llama, "rotary", _by_width, causal=True, family="qwen2"),
    "qwen3": ShapeKind(_llama, "rotary", _by_width, causal=True, family="qwen3"),
    "bilstm": ShapeKind(_recurrent, "none", lambda shape: RECURRENT_RATE),
    "static": ShapeKind(_static, "none", lambda shape: STATIC_RATE),
}
"""The kinds of students, by the `model_type` of the student's config. `find_kind` adds the kinds of
other packages."""
GROUP = "teachonce.student_kinds"  # the entry points by which other packages add kinds


def find_kind(kind: str, option: str = "--student ") -> ShapeKind | None:
    """Find a kind of student by name, or return None.

    A name is of this package, of an entry point in `teachonce.student_kinds`, or the
    `module:attribute` of a `ShapeKind`. Raises UserError for code that cannot be imported, and for
    an object that is not a `ShapeKind`.
    """
    if kind not in SHAPES:
        loaded = load_outside(kind, GROUP, option.rstrip())
        if loaded is None:
            return None
        if not isinstance(loaded, ShapeKind):
            raise UserError(f"{option}{kind}: expected a ShapeKind, got {type(loaded).__name__}")
        # Stored, because the properties of `Shape` find its kind there.
        SHAPES[kind] = loaded
    return SHAPES[kind]


def parse_student(student: str, option: str = "--student ") -> Shape:
    """Parse a shape such as `tiny`, `264x3x12`, `bert:256x6x4x512` or `bilstm:300,600`.

    option: the start of an error message.
    Raises UserError for an unknown kind or an invalid size.
    """
    if student.startswith(SCRATCH):
        raise UserError(
            f"{option}{student}: the prefix {SCRATCH} is for `downstream --model` only; give"
            f" {student.removeprefix(SCRATCH)}"
        )
    # From the right, because a kind of another package may be `module:attribute`.
    named, colon, size = student.rpartition(":")
    kind = named or DEFAULT_KIND
    if named == "teacher":
        raise UserError(f"{option}{student}: {OF_MODEL}")
    if (shape_kind := find_kind(kind, option)) is None:
        raise UserError(
            f"{option}{student}: unknown kind of student {kind}; {suggest(kind, SHAPES)}expected"
            f" one of {', '.join(SHAPES)}"
        )
    try:
        return shape_kind.read(kind, size)
    except ValueError as error:
        if os.path.isfile(os.path.join(student, "config.json")):  # False if the name is too long
            raise UserError(f"{option}{student}: {OF_MODEL}") from None
        problem, *meant = error.args
        prefix = option.rpartition(" ")[2] + named + colon  # what the value begins with
        hint = "".join(f": {prefix}{size}?" for size in meant)
        if os.sep in student and not colon:
            lacks = "has no config.json" if os.path.isdir(student) else "no such folder"
            raise UserError(
                f"{option}{student}: {lacks}; {suggest_path(student)}give the folder of a model, or"
                " a shape such as 128x2x2"
            ) from None
        near = suggest(student, ("tiny",))
        if not colon and not near and (kinds := get_close_matches(student, SHAPES, n=1)):
            near = f"did you mean {kinds[0]}:SIZE? "
        raise UserError(f"{option}{student}: {near}{problem}{hint}") from None
