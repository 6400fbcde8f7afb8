"""Checks the arrays of texts, tokens and masks, and encodes them for a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.errors import StoreError
from teachonce.store.format.features import TaskSpec
from teachonce.support.arrays import Array, starts

ACTIONS = 3


def _encode_text(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(
            f"{where}: the text has half of a surrogate pair at character {error.start}; "
            "clean the corpus"
        ) from error


def encode_sequences(
    texts: Sequence[str],
    token_start: Array,
    vocabulary: int,
    where: str,
    columns: Mapping[str, ArrayLike],
    token_ids: ArrayLike,
    offsets: ArrayLike,
    special: ArrayLike,
) -> dict[str, Array]:
    """Make the arrays sequence/*, text/utf8 and token/* of a part.

    Raises StoreError, which names the sequence.
    """
    sequences, tokens = len(token_start) - 1, int(token_start[-1])
    ids, spans = np.asarray(token_ids, np.int64), np.asarray(offsets, np.int64)
    flags = np.asarray(special, bool)
    shapes = (
        ("texts", np.empty(len(texts)), (sequences,)),
        ("token_ids", ids, (tokens,)),
        ("offsets", spans, (tokens, 2)),
        ("special", flags, (tokens,)),
        *((name, np.asarray(column), (sequences,)) for name, column in columns.items()),
    )
    for name, array, expected in shapes:
        if array.shape != expected:
            raise StoreError(
                f"{where}: {name} has shape {list(array.shape)}, expected {list(expected)}"
            )
    _check_tokens(texts, token_start, vocabulary, where, ids, spans, flags)
    encoded = [_encode_text(text, f"{where}, sequence {n}") for n, text in enumerate(texts)]
    return {
        "sequence/document": np.asarray(columns["document"], np.int64),
        "sequence/document_begin": np.asarray(columns["document_begin"], np.int64),
        "sequence/hard_cut": np.asarray(columns["hard_cut"], bool),
        "sequence/text_start": starts([len(data) for data in encoded]),
        "sequence/token_start": token_start.astype(np.int64),
        "text/utf8": np.frombuffer(b"".join(encoded), np.uint8),
        "token/id": ids.astype(np.uint32),
        "token/begin": spans[:, 0].astype(np.int32),
        "token/end": spans[:, 1].astype(np.int32),
        "token/special": flags,
    }


def _check_tokens(
    texts: Sequence[str],
    token_start: Array,
    vocabulary: int,
    where: str,
    ids: Array,
    spans: Array,
    special: Array,
) -> None:
    """Raise StoreError for the first token outside the vocabulary or its text, and for a special
    token that covers text."""
    lengths = np.array([len(text) for text in texts], np.int64)
    limits = np.repeat(lengths, np.diff(token_start))
    begin, end = spans.T
    for bad, what in (
        ((ids < 0) | (ids >= vocabulary), f"token id outside the vocabulary of {vocabulary}"),
        ((begin < 0) | (begin > end) | (end > limits), "offsets outside the text"),
        (special & (end > 0), "special token with offsets (expected 0, 0)"),
    ):
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            sequence = int(np.searchsorted(token_start, row, "right")) - 1
            raise StoreError(
                f"{where}, sequence {sequence}, token {row - token_start[sequence]}: {what} "
                f"(id {ids[row]}, span {begin[row]}..{end[row]} of {limits[row]} characters)"
            )


def encode_gold(
    task: TaskSpec, gold: ArrayLike | None, token_start: Array, special: ArrayLike, where: str
) -> Array:
    """Make the int32 array of gold labels [n] or tags [N], -1 where there is none.

    Raises StoreError, which names the place.
    """
    tagging = task.kind == "tagging"
    size = int(token_start[-1]) if tagging else len(token_start) - 1
    values = np.full(size, -1, np.int64) if gold is None else np.asarray(gold, np.int64)
    if values.shape != (size,):
        raise StoreError(f"{where}: gold labels have shape {list(values.shape)}, expected [{size}]")
    bad = wrong_gold(task, values, np.asarray(special, bool))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        sequence = int(np.searchsorted(token_start, row, "right")) - 1 if tagging else row
        raise StoreError(
            f"{where}, sequence {sequence}: gold label {values[row]}, expected -1 (none) or"
            f" 0..{len(task.labels) - 1}, and -1 for special tokens"
        )
    return values.astype(np.int32)


def wrong_gold(task: TaskSpec, gold: Array, special: Array) -> Array:
    """Find gold numbers that no label has, and tags of special tokens: bool, shaped as `gold`."""
    bad = (gold < -1) | (gold >= len(task.labels))
    return bad | (special & (gold != -1)) if task.kind == "tagging" else bad


def encode_masks(spans: Sequence[ArrayLike], texts: Sequence[str], where: str) -> dict[str, Array]:
    """Make the arrays start, begin, end and action of the masked words.

    Raises StoreError, which names the sequence.
    """
    if len(spans) != len(texts):
        raise StoreError(f"{where}: masks of {len(spans)} sequences, expected {len(texts)}")
    rows = []
    for number, (given, text) in enumerate(zip(spans, texts, strict=True)):
        masked = np.asarray(given, np.int64).reshape(-1, 3)
        begin, end, action = masked.T
        ordered = (begin < end).all() and (begin[1:] >= end[:-1]).all()
        inside = not len(masked) or (begin[0] >= 0 and end[-1] <= len(text))
        if not ordered or not inside or ((action < 0) | (action >= ACTIONS)).any():
            raise StoreError(
                f"{where}, sequence {number}: masked words must be ascending spans begin < end of "
                f"its {len(text)} characters with an action 0..{ACTIONS - 1}"
            )
        rows.append(masked)
    joined = np.concatenate(rows) if rows else np.empty((0, 3), np.int64)
    return {
        "start": starts([len(masked) for masked in rows]),
        "begin": joined[:, 0].astype(np.int32),
        "end": joined[:, 1].astype(np.int32),
        "action": joined[:, 2].astype(np.uint8),
    }
