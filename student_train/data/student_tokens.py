"""The student's input: a store's text in the student's tokens, and its masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.align import Tokens
from teachonce.store.format.sequences import offsets_of, spans_of
from teachonce.store.read.stored_tokenizer import encoded
from teachonce.support.arrays import Array, covering_spans_of_texts, ranges, starts
from teachonce.training.rare_masks import rare_weights, sampling_keys

# `start` counts the tokens of a whole store, which may exceed int32; ids and offsets do not.
ARRAYS: Mapping[str, type] = {
    "start": np.int64,
    "ids": np.int32,
    "begin": np.int32,
    "end": np.int32,
    "special": np.bool_,
    "types": np.uint8,
}
ROWS_AT_ONCE = 2**20  # a table may be larger than the memory
# The label that transformers and torch's cross-entropy leave out.
IGNORED = -100
MASK, RANDOM = 0, 1  # actions of a stored span; any other leaves the tokens as they are


@dataclass(frozen=True)
class TokenTable:
    """Holds the tokens of all sequences of a store in flat, memory-mapped arrays.

    start int64 [n+1]; ids, begin, end int32 [N], special bool [N], types uint8 [N].
    """

    start: Array
    ids: Array
    begin: Array
    end: Array
    special: Array
    types: Array
    folder: Path | None = None

    @classmethod
    def load(cls, folder: Path) -> TokenTable:
        """Map the files of a folder. Raises ValueError for an invalid file, OSError for a missing
        file."""
        columns = {name: _mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
        return cls(**columns, folder=folder)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's name instead of the arrays: the other process maps the same files."""
        arrays = (self.start, self.ids, self.begin, self.end, self.special, self.types)
        return (TokenTable, arrays) if self.folder is None else (TokenTable.load, (self.folder,))

    @cached_property  # 100 million tokens take 2.7 s, and each validation reads it
    def counts(self) -> Array:
        """Count how often each piece occurs in the store: int64, up to the largest id."""
        counts = np.zeros(0, np.int64)
        for rows in slices(len(self.ids)):
            chunk = np.bincount(self.ids[rows], minlength=len(counts))
            chunk[: len(counts)] += counts
            counts = chunk
        return counts

    def of(self, index: Array) -> Tokens:
        """Return the tokens of the sequences with the numbers `index` [B], concatenated."""
        lengths = self.start[index + 1] - self.start[index]
        rows = ranges(self.start[index], lengths)
        offsets = np.stack([self.begin[rows], self.end[rows]], axis=1)
        ids, special = self.ids[rows].astype(np.int64), self.special[rows]
        return Tokens(ids, offsets, special, starts(lengths), self.types[rows])


def tokenize(tokenizer: Any, texts: list[str], separator: str | None = None) -> Tokens:
    """Tokenize texts with a `tokenizers.Tokenizer` and its truncation.

    separator: splits a text into a pair; truncation shortens the longer text of a pair first.
    """
    encodings = encoded(tokenizer, texts, "--vocab", separator)
    if separator is None:
        spans = spans_of(encodings)
    else:
        pairs = zip(encodings, texts, strict=True)
        spans = np.concatenate([offsets_of(encoding, text, separator) for encoding, text in pairs])
    return Tokens(
        ids=np.array([i for e in encodings for i in e.ids], np.int64),
        offsets=spans,
        special=np.array([s for e in encodings for s in e.special_tokens_mask], bool),
        start=starts([len(e.ids) for e in encodings]),
        types=np.array([t for e in encodings for t in e.type_ids], np.uint8),
    )


def slices(rows: int) -> Iterator[slice]:
    """Cut N rows into slices of at most `ROWS_AT_ONCE`."""
    for low in range(0, rows, ROWS_AT_ONCE):
        yield slice(low, min(low + ROWS_AT_ONCE, rows))


def _mapped(file: Path, dtype: type) -> Array:
    empty = not file.stat().st_size  # an empty file cannot be mapped
    return np.empty(0, dtype) if empty else np.memmap(file, dtype, mode="r")


@dataclass(frozen=True)
class MaskedTokens:
    """Holds the student's input ids int64 [N], and labels int64 [N]: the id to predict, or
    IGNORED. learnt: bool [N], the tokens that a decoder is trained on; None for all."""

    ids: Array
    labels: Array
    learnt: Array | None = None


class Masker:
    """Masks tokens as BERT does (Devlin et al. 2019, section 3.1).

    80 % of the chosen tokens become the mask, 10 % a random piece, 10 % are unchanged. Special
    tokens are never chosen. Every draw depends on an explicit key.

    probability: the share of tokens that are chosen.
    counts: the count [V] of each piece; if given, pieces are chosen in proportion to count^-0.7
        (Sanh et al. 2019, after Lample & Conneau 2019).
    most: the largest number of masked tokens in a sequence.
    """

    def __init__(
        self,
        mask_id: int,
        vocabulary: int,
        special_ids: set[int],
        probability: float,
        counts: Array | None = None,
        most: int | None = None,
    ) -> None:
        self.mask_id, self.probability, self.most = mask_id, probability, most
        self.weights = None if counts is None else rare_weights(counts)
        self.ordinary = np.array([i for i in range(vocabulary) if i not in special_ids])

    def dynamic(self, tokens: Tokens, key: tuple[int, ...]) -> MaskedTokens:
        rng = np.random.default_rng(key)
        order = rng.random(len(tokens.ids))
        if self.weights is None:
            chosen = (order < self.probability) & ~tokens.special
        else:
            order = sampling_keys(order, self.weights[np.asarray(tokens.ids)])
            chosen = self._weighted(tokens, order)
        if self.most is not None:
            # In the order of the draws: the masks that remain are a random choice, not the first
            # ones of the text.
            chosen = _first_of_each(tokens, chosen, order, self.most)
        action = np.searchsorted([0.8, 0.9], rng.random(len(tokens.ids)), side="right")
        return self._apply(tokens, chosen, action, rng)

    def _weighted(self, tokens: Tokens, order: Array) -> Array:
        """Choose a share of `probability` of the tokens that are not special: the tokens with the
        smallest keys. `order` holds the `sampling_keys` of all tokens."""
        order = np.where(tokens.special, np.inf, order)
        count = round(self.probability * int((~tokens.special).sum()))
        chosen = np.zeros(len(order), bool)
        chosen[np.argsort(order, kind="stable")[:count]] = True
        return chosen

    def stored(
        self, tokens: Tokens, spans: Array, spans_start: Array, key: tuple[int, ...]
    ) -> MaskedTokens:
        """Mask the words that were masked for the teacher.

        `spans` [M,3] holds (begin, end, action) in characters; spans_start[b] is the first span of
        sequence b. A token is masked if it overlaps a span.
        """
        rng = np.random.default_rng(key)
        span = covering_spans_of_texts(
            tokens.offsets, np.diff(tokens.start), spans, np.diff(spans_start)
        )
        chosen = (span >= 0) & ~tokens.special
        action = np.where(chosen, spans[span, 2] if len(spans) else 0, 2)
        return self._apply(tokens, chosen, action, rng)

    def _apply(
        self, tokens: Tokens, chosen: Array, action: Array, rng: np.random.Generator
    ) -> MaskedTokens:
        ids = np.asarray(tokens.ids).astype(np.int64)
        labels = np.where(chosen, ids, IGNORED)
        # A draw for each token, chosen or not: another number of draws would give other students.
        random_ids = rng.choice(self.ordinary, len(ids))
        ids = np.where(chosen & (action == MASK), self.mask_id, ids)
        ids = np.where(chosen & (action == RANDOM), random_ids, ids)
        return MaskedTokens(ids, labels)


def _first_of_each(tokens: Tokens, chosen: Array, order: Array, most: int) -> Array:
    """Limit the chosen tokens of each sequence to the first `most` in the order of `order`."""
    sequence = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((order[rows], sequence[rows]))]
    first = np.searchsorted(sequence[rows], sequence[rows])
    limited = np.zeros(len(chosen), bool)
    limited[rows[np.arange(len(rows)) - first < most]] = True
    return limited


def pair_types(tokens: Tokens, texts: Sequence[str], separator: str) -> Array:
    """Return the token types of text pairs: int64 [N], 0 for the first text and 1 for the second.

    A special token has the type of the text before it, as in BERT's template. If the second text
    has no token, the last special token has type 1.
    """
    sequence = np.repeat(np.arange(len(texts)), np.diff(tokens.start))
    boundary = np.array([text.index(separator) for text in texts], np.int64)
    second = ~tokens.special & (tokens.offsets[:, 0] > boundary[sequence])
    first = tokens.start[1:] - 1  # of the second text's tokens
    np.minimum.at(first, sequence[second], np.flatnonzero(second))
    return (np.arange(len(sequence)) >= first[sequence]).astype(np.int64)
