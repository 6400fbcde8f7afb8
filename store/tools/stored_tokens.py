"""Check that the stored tokenizer produces the stored tokens."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import version
from typing import Any

import numpy as np

from teachonce.store.errors import VERIFY, StoreError, without_remedy
from teachonce.store.format.sequences import offsets_of
from teachonce.store.read.part import PartReader
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.read.stored_tokenizer import encoded, within_bounds
from teachonce.store.tools.damaged import open_damaged
from teachonce.support.arrays import Array, spread

BATCH = 256  # sequences that are tokenized at once
PLACES, SEQUENCES = 8, 8  # what a training checks: SEQUENCES in a row at each of PLACES positions


def parts_with_other_tokens(store: FeatureStore, places: list[int]) -> list[tuple[int, str]]:
    """Check the parts with the indices `places`. Return (index, line) for each part whose stored
    tokens cannot be read, or differ from the stored tokenizer's. Raises StoreError for a tokenizer
    that exceeds its limits."""
    lines: list[tuple[int, str]] = within_bounds(
        store.teacher_file("tokenizer.json"),
        sum(store.manifest.parts[index].counts.text_bytes for index in places),
        store.path,
        lambda: _other_parts(store, places),
        _other_parts_of,
        (store.source.address, store.source.options, places),
    )
    return lines


def _other_parts_of(
    path: str, options: dict[str, Any] | None, indices: list[int]
) -> list[tuple[int, str]]:
    # `verify` calls this for damaged stores too, which `open_store` refuses.
    with closing(open_damaged(path, options).store) as store:
        return _other_parts(store, indices)


def _other_parts(store: FeatureStore, indices: list[int]) -> list[tuple[int, str]]:
    tokenizer, lines = store.tokenizer(), []
    for index in indices:
        part = store.part(index)
        try:
            line = other_tokens(part, tokenizer, 0, part.part.counts.sequences)
        except StoreError as error:
            line = without_remedy(error)
        if line:
            lines.append((index, line))
    return lines


def other_tokens(part: PartReader, tokenizer: Any, first: int, last: int) -> str | None:
    """Describe the first sequence among first..last of a part for which `tokenizer` produces other
    tokens than the stored ones; return None if all tokens are equal. Raises StoreError for more
    tokens than a text can have."""
    for low in range(first, last, BATCH):
        high = min(low + BATCH, last)
        edges = part.token_start[low : high + 1]
        columns = ("id", "begin", "end", "special")
        stored = np.stack([part.read(f"token/{c}", edges[0], edges[-1]) for c in columns], axis=1)
        texts, separator = part.texts(low, high), part.features.separator
        encodings = encoded(tokenizer, texts, part.where, separator)
        for number, (text, encoding) in enumerate(zip(texts, encodings, strict=True), low):
            left, right = part.token_start[number : number + 2] - edges[0]
            if not np.array_equal(_rows(encoding, text, separator), stored[left:right]):
                return (
                    f"{part.where}: the tokenizer does not give the stored tokens of sequence"
                    f" {number} of the part ({len(encoding.ids)} tokens now, {right - left} stored)"
                )
    return None


def _rows(encoding: Any, text: str, separator: str | None) -> Array:
    special = np.array(encoding.special_tokens_mask, bool)
    spans = offsets_of(encoding, text, separator)
    return np.column_stack([np.array(encoding.ids, np.int64), spans, special])


def check_tokens(store: FeatureStore) -> None:
    """Raise StoreError if there are no stored tokens, if they cannot be read, or if the stored
    tokenizer produces others.

    Checks SEQUENCES consecutive sequences at each of PLACES positions, spread evenly over the
    store, up to the first difference, with bounds on time and memory.
    """
    if not len(store):
        raise StoreError(f"{store.path}: no part was published; finish the dump that writes it")
    rows = spread(len(store), PLACES)
    difference = within_bounds(
        store.teacher_file("tokenizer.json"),
        len(rows) * SEQUENCES * store.features.max_length,
        store.path,
        lambda: _first_difference(store, rows),
        _first_difference_of,
        (store.source.address, store.source.options, rows),
    )
    if difference:
        written, installed = store.meta["software"].get("tokenizers"), version("tokenizers")
        remedy = f"written with tokenizers {written}, read with {installed}: install {written}"
        # Versions that are equal, or unknown, do not explain the difference.
        if written in (None, installed):
            remedy = VERIFY
        raise StoreError(f"{difference}; {remedy}, or dump again")


def _first_difference_of(path: str, options: dict[str, Any] | None, rows: list[int]) -> str | None:
    # A training with --allow-partial checks an unfinished store.
    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        return _first_difference(store, rows)


def _first_difference(store: FeatureStore, rows: list[int]) -> str | None:
    tokenizer = store.tokenizer()
    for row in rows:
        part, first = store.locate(row)
        last = min(first + SEQUENCES, part.part.counts.sequences)
        if line := other_tokens(part, tokenizer, first, last):
            return line
    return None
