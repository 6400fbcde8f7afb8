"""Check the texts, tokens and masks of a part, and encode them as arrays. A pair of texts is stored
as one text with a separator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.errors import StoreError
from teachonce.store.format.features import CONTEXT, LEARN, MARKS, Features, TaskSpec
from teachonce.store.format.layout import SpanKind, span_kind
from teachonce.support.arrays import Array, starts


def _encode_text(text: str, where: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(
            f"{where}: the text has half of a surrogate pair at character {error.start}; "
            "clean the corpus"
        ) from error


@dataclass(frozen=True, eq=False)
class Sequences:
    """Holds the n sequences of a part, in order, with N tokens in all.

    texts: [n].
    document: [n], number of the document in the corpus.
    document_begin: [n], character of the document at which the sequence starts.
    hard_cut: bool [n], the sequence starts inside a word.
    token_ids: [N].
    offsets: [N, 2], half-open spans in characters of the text; 0, 0 for special tokens.
    special: bool [N].
    gold: labels [n] or tags [N] of a store with a task, -1 for none; None if there are none at all.
    context: [n], for each sequence the number of its first tokens that only give context; None if
        no sequence has any.
    learn: bool [N], the tokens that students are trained on; None for all.
    messages: [n], for each sequence int32 [M, 3]: begin and end of the content of each message of a
        chat, in characters of the text, and the number of its role in `ROLES` or UNLISTED_ROLE.
    """

    texts: Sequence[str]
    document: ArrayLike
    document_begin: ArrayLike
    hard_cut: ArrayLike
    token_ids: ArrayLike
    offsets: ArrayLike
    special: ArrayLike
    gold: ArrayLike | None = None
    context: ArrayLike | None = None
    learn: ArrayLike | None = None
    messages: Sequence[ArrayLike] | None = None


def encode_sequences(
    given: Sequences, token_start: Array, features: Features, where: str
) -> dict[str, Array]:
    """Return the arrays sequence/*, text/utf8 and token/* of a part, with any gold labels.

    Raises StoreError, which names the sequence and token, for values that FORMAT.md forbids.
    """
    sequences, tokens = len(token_start) - 1, int(token_start[-1])
    # Checked in int64, because a wrong number may become a right one in a narrower type.
    arrays = {
        name: np.asarray(getattr(given, name), dtype)
        for name, dtype in (
            ("document", np.int64),
            ("document_begin", np.int64),
            ("hard_cut", bool),
            ("token_ids", np.int64),
            ("offsets", np.int64),
            ("special", bool),
        )
    }
    expected = {"token_ids": (tokens,), "offsets": (tokens, 2), "special": (tokens,)}
    for name, array in {"texts": np.empty(len(given.texts)), **arrays}.items():
        shape = expected.get(name, (sequences,))
        if array.shape != shape:
            raise StoreError(
                f"{where}: {name} has shape {list(array.shape)}, expected {list(shape)}"
            )
    _check_tokens(arrays, given.texts, token_start, features.vocabulary, where)
    texts = [_encode_text(text, f"{where}, sequence {n}") for n, text in enumerate(given.texts)]
    encoded = {
        "sequence/document": arrays["document"],
        "sequence/document_begin": arrays["document_begin"],
        "sequence/hard_cut": arrays["hard_cut"],
        "sequence/text_start": starts([len(data) for data in texts]),
        "sequence/token_start": token_start.astype(np.int64),
        "text/utf8": np.frombuffer(b"".join(texts), np.uint8),
        "token/id": arrays["token_ids"].astype(np.uint32),
        "token/begin": arrays["offsets"][:, 0].astype(np.int32),
        "token/end": arrays["offsets"][:, 1].astype(np.int32),
        "token/special": arrays["special"],
    }
    encoded |= _encode_marks(given, token_start, features, where)
    if features.messages:
        contents = [()] * sequences if given.messages is None else given.messages
        encoded |= encode_spans(contents, given.texts, where, span_kind(0))
    if task := features.task:
        encoded[task.gold] = _encode_gold(task, given.gold, token_start, arrays["special"], where)
    elif given.gold is not None:
        raise StoreError(f"{where}: this store has no task, so no gold labels")
    return encoded


def _check_tokens(
    arrays: Mapping[str, Array],
    texts: Sequence[str],
    token_start: Array,
    vocabulary: int,
    where: str,
) -> None:
    """Raise StoreError, which names the token, for an id outside the vocabulary, and for offsets
    outside the text, or of a special token."""
    ids, (begin, end), special = arrays["token_ids"], arrays["offsets"].T, arrays["special"]
    limits = np.repeat([len(text) for text in texts], np.diff(token_start))
    for bad, problem in (
        ((ids < 0) | (ids >= vocabulary), f"token id outside the vocabulary of {vocabulary}"),
        ((begin < 0) | (begin > end) | (end > limits), "offsets outside the text"),
        (special & (end > 0), "special token with offsets (expected 0, 0)"),
    ):
        if bad.any():
            row = int(bad.argmax())
            sequence = int(np.searchsorted(token_start, row, "right")) - 1
            raise StoreError(
                f"{where}, sequence {sequence}, token {row - token_start[sequence]}: {problem} "
                f"(id {ids[row]}, span {begin[row]}..{end[row]} of {limits[row]} characters); check"
                " the tokenizer that made the tokens"
            )


def _encode_marks(
    given: Sequences, token_start: Array, features: Features, where: str
) -> dict[str, Array]:
    """Return the arrays that mark the tokens that students are trained on. Raises StoreError."""
    lengths, marks = np.diff(token_start), dict[str, Array]()
    if features.context:
        zeros = np.zeros(len(lengths), np.int64)
        context = zeros if given.context is None else np.asarray(given.context, np.int64)
        if context.shape != lengths.shape or ((context < 0) | (context >= lengths)).any():
            raise StoreError(
                f"{where}: context must have a count of tokens for each of {len(lengths)}"
                " sequences, at least 0 and below the sequence's length"
            )
        marks[CONTEXT] = context.astype(np.int32)
    if features.learn:
        total = int(token_start[-1])
        learn = np.ones(total, bool) if given.learn is None else np.asarray(given.learn, bool)
        if learn.shape != (total,):
            raise StoreError(f"{where}: learn has shape {list(learn.shape)}, expected [{total}]")
        marks[LEARN] = learn
    for key in MARKS:
        if getattr(given, key) is not None and not getattr(features, key):
            raise StoreError(f"{where}: {key} was given, but this store has no {key}")
    return marks


def _encode_gold(
    task: TaskSpec, gold: ArrayLike | None, token_start: Array, special: Array, where: str
) -> Array:
    """Return the gold labels [n] or tags [N] as int32, -1 for none.

    Raises StoreError, which names the sequence.
    """
    tagging = task.kind == "tagging"
    size = int(token_start[-1]) if tagging else len(token_start) - 1
    values = np.full(size, -1, np.int64) if gold is None else np.asarray(gold, np.int64)
    if values.shape != (size,):
        raise StoreError(f"{where}: gold labels have shape {list(values.shape)}, expected [{size}]")
    bad = wrong_gold(task, values, special)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        sequence = int(np.searchsorted(token_start, row, "right")) - 1 if tagging else row
        raise StoreError(
            f"{where}, sequence {sequence}: gold label {values[row]}, expected -1 (none) or"
            f" 0..{len(task.labels) - 1}, and -1 for special tokens"
        )
    return values.astype(np.int32)


def wrong_gold(task: TaskSpec, gold: Array, special: Array) -> Array:
    """Mark gold numbers that are not a label id, and tags of special tokens: bool, shaped as
    `gold`."""
    bad = (gold < -1) | (gold >= len(task.labels))
    return bad | (special & (gold != -1)) if task.kind == "tagging" else bad


def encode_spans(
    spans: Sequence[ArrayLike], texts: Sequence[str], where: str, kind: SpanKind
) -> dict[str, Array]:
    """Return the arrays `start`, `begin`, `end` and `kind.number` by path in the part.

    spans: [M, 3] for each sequence. Raises StoreError, which names the sequence.
    """
    if len(spans) != len(texts):
        raise StoreError(f"{where}: {kind.plural} of {len(spans)} sequences, expected {len(texts)}")
    rows = []
    for number, (listed, text) in enumerate(zip(spans, texts, strict=True)):
        triples = np.asarray(listed, np.int64).reshape(-1, 3)
        begin, end, numbers = triples.T
        ordered = not kind.too_short(begin, end).any() and (begin[1:] >= end[:-1]).all()
        # Of ascending spans, the first and the last bound all others.
        inside = not len(triples) or (begin[0] >= 0 and end[-1] <= len(text))
        if not ordered or not inside or not np.isin(numbers, kind.numbers).all():
            raise StoreError(
                f"{where}, sequence {number}: {kind.plural} must be ascending spans begin"
                f" {'<=' if kind.empty else '<'} end of its {len(text)} characters with the"
                f" {kind.number}"
                f" {', '.join(map(str, kind.numbers))}"
            )
        rows.append(triples)
    flat = np.concatenate(rows) if rows else np.empty((0, 3), np.int64)
    arrays = {
        "start": starts([len(triples) for triples in rows]),
        "begin": flat[:, 0].astype(np.int32),
        "end": flat[:, 1].astype(np.int32),
        kind.number: flat[:, 2].astype(np.uint8),
    }
    return {f"{kind.group}/{name}": array for name, array in arrays.items()}


SEPARATOR = "\x1f"
"""The separator that this software writes: ASCII's unit separator. No tokenizer treats it as a
letter, and hardly any text contains it."""


def split_pair(text: str, separator: str | None, where: str) -> tuple[str, ...]:
    """Return both texts of a pair, which `separator` joins; if it is None, the text alone.

    Raises StoreError unless the separator occurs exactly once.
    """
    if separator is None:
        return (text,)
    texts = tuple(text.split(separator))
    if len(texts) != 2:
        raise StoreError(
            f"{where}: the separator of a pair of texts, {separator!r}, occurs"
            f" {len(texts) - 1} times in {text!r:.60}, expected once; dump again"
        )
    return texts


def tokenizer_inputs(texts: list[str], separator: str | None, where: str) -> list[Any]:
    """Return stored texts as the input of a tokenizer's `encode_batch`: texts, or pairs.

    Raises StoreError as `split_pair` does.
    """
    if separator is None:
        return list(texts)
    return [split_pair(text, separator, where) for text in texts]


def spans_of(encodings: Iterable[Any]) -> Array:
    """Return the offsets of encodings, one after the other: int32 [T, 2]."""
    # np.array would take twice as long for a list of tuples.
    spans = chain.from_iterable(encoding.offsets for encoding in encodings)
    return np.fromiter(chain.from_iterable(spans), np.int32).reshape(-1, 2)


def offsets_of(encoding: Any, text: str, separator: str | None) -> Array:
    """Return the offsets of an encoding in the stored text: int32 [T, 2], (0, 0) for special
    tokens.

    separator: the character between the texts of a pair in `text`; None for a single text.
    """
    offsets = spans_of([encoding])
    if separator is not None:  # tokenizers count the characters of the second text from 0 again
        second = np.array([number == 1 for number in encoding.sequence_ids], bool)
        # `TaskSpec` allows a separator of one character alone.
        offsets[second] += text.index(separator) + 1
    offsets[np.array(encoding.special_tokens_mask, bool)] = 0
    return offsets


def has_pair_form(tokenizer: Any) -> bool:
    """Return whether a `tokenizers.Tokenizer` puts a special token between the two texts of a
    pair."""
    pair, single = (tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (True, False))
    return bool(pair > single)
