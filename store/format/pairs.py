"""Pairs of texts, which a store holds as one text with a separator between them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.support.arrays import Array

SEPARATOR = "\x1f"
"""The separator that this software writes: ASCII's unit separator. No tokenizer treats it as a
letter, and hardly any text contains it."""


def split_pair(text: str, separator: str | None, where: str) -> tuple[str, ...]:
    """Return both texts of a pair, or the text alone if `separator` is None.

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
    tokens."""
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
