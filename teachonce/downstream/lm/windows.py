"""Cuts documents into windows of tokens. Each token but the first of a document is predicted
once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.align import Tokens
from teachonce.align.byte_edges import PieceBytes
from teachonce.checkpoints.first_token import prepended_token
from teachonce.student_train.data.next_tokens import predicted_bytes
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.vocabularies import read_vocabulary
from teachonce.support.arrays import Array

AT_ONCE = 1000  # documents that are tokenized together


@dataclass(frozen=True)
class Documents:
    """Holds the token ids of documents, each int64 [N] with a start token in front, and the number
    of bytes of all tokens that are predicted."""

    ids: list[Array]
    bytes: int

    @property
    def predicted(self) -> int:
        """Count the predicted tokens: all tokens but the first of each document."""
        return sum(len(ids) - 1 for ids in self.ids)


def start_token(tokenizer: Any) -> int | None:
    """Return the id of the token to put in front of each document: the token that the tokenizer
    puts in front of a text, else its bos, else its eos; None if it has none of the three."""
    prepended = prepended_token(tokenizer.backend_tokenizer)
    candidates = (prepended, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), None)


def read_documents(tokenizer: Any, texts: Sequence[str]) -> Documents:
    """Tokenize texts for a fast tokenizer of transformers.

    Without a start token, the first token of a text is not predicted, and its bytes do not count.

    Raises UserError for a tokenizer that `align` cannot read.
    """
    backend, start = tokenizer.backend_tokenizer, start_token(tokenizer)
    backend.no_truncation()
    backend.no_padding()
    where = f"model {tokenizer.name_or_path}: the bytes of its tokens cannot be counted"
    pieces = PieceBytes.of(read_vocabulary(backend.to_str(), where))
    sequences, count = list[Array](), 0
    for low in range(0, len(texts), AT_ONCE):
        batch = list(texts[low : low + AT_ONCE])
        tokens = _with_start(tokenize(backend, batch), start)
        count += predicted_bytes(batch, tokens, pieces)
        ids = np.asarray(tokens.ids, np.int64)
        sequences += np.split(ids, tokens.start[1:-1])
    return Documents(sequences, count)


def _with_start(tokens: Tokens, start: int | None) -> Tokens:
    """Remove the special tokens around each text, and put the token `start`, unless it is None, in
    front of the text."""
    # Tokens that a tokenizer adds after a text are not part of it, and would be scored.
    ordinary = ~np.asarray(tokens.special)
    sequence = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))[ordinary]
    # `minlength`: else texts without tokens at the end of the list would have no length.
    lengths = np.bincount(sequence, minlength=len(tokens.start) - 1)
    begin = np.append(0, np.cumsum(lengths))
    ids, offsets = tokens.ids[ordinary], tokens.offsets[ordinary]
    special = np.zeros(len(ids), bool)
    if start is None:
        return Tokens(ids, offsets, special, begin)
    at = begin[:-1]
    return Tokens(
        np.insert(ids, at, start),
        np.insert(offsets, at, 0, axis=0),
        np.insert(special, at, True),
        begin + np.arange(len(begin)),
    )


@dataclass(frozen=True)
class ScoredWindow:
    """Describes a window: the tokens [begin, end) of the document `number`.

    scored: the first token whose prediction counts in this window.
    """

    number: int
    begin: int
    scored: int
    end: int


def sliding_windows(lengths: Sequence[int], size: int, shared: int) -> Iterator[ScoredWindow]:
    """Cut documents of `lengths` tokens into windows of at most `size` tokens.

    Consecutive windows share `shared` tokens, 1 to size - 1: each predicted token has at least this
    number of tokens before it in its window, or all tokens that precede it in the document. Every
    token but the first of a document is predicted in exactly one window.
    """
    for number, length in enumerate(lengths):
        begin, scored = 0, 1
        while scored < length:
            end = min(begin + size, length)
            yield ScoredWindow(number, begin, scored, end)
            begin, scored = end - shared, end
