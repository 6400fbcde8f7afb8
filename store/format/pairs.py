"""Pairs of texts: two texts that a store keeps as one, with a separator between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.support.arrays import Array

SEPARATOR = "\x1f"
"""What this software writes between the texts of a pair: ASCII's unit separator, which no
tokenizer takes for a letter and which hardly any text holds."""


def split_pair(text: str, separator: str | None, where: str) -> tuple[str, ...]:
    """Return both texts of a pair; the text alone where there is no separator.

    Raises StoreError unless the separator stands in the text of a pair just once.
    """
    if separator is None:
        return (text,)
    texts = tuple(text.split(separator))
    if len(texts) != 2:
        raise StoreError(
            f"{where}: the separator of a pair of texts, {separator!r}, stands"
            f" {len(texts) - 1} times in {text!r:.60}, expected once; dump again"
        )
    return texts


def tokenizer_inputs(texts: list[str], separator: str | None, where: str) -> list[Any]:
    """Return what `encode_batch` of a tokenizer takes for stored texts: texts, or pairs of them.

    Raises StoreError as `split_pair` does.
    """
    if separator is None:
        return list(texts)
    return [split_pair(text, separator, where) for text in texts]


def offsets_of(encoding: Any, text: str, separator: str | None) -> Array:
    """Return the offsets of an encoding in the stored text: int32 [T,2], 0 of special tokens.

    A tokenizer counts the characters of each text of a pair from 0.
    """
    offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    if separator is not None:
        second = np.array([number == 1 for number in encoding.sequence_ids], bool)
        offsets[second] += text.index(separator) + 1
    offsets[np.array(encoding.special_tokens_mask, bool)] = 0
    return offsets


def has_pair_form(tokenizer: Any) -> bool:
    """Tell whether a `tokenizers.Tokenizer` puts a special token between two texts."""
    pair, single = (tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (True, False))
    return bool(pair > single)
