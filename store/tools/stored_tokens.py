"""Check that the stored tokenizer produces the stored tokens."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import version
from typing import Any

import numpy as np

from teachonce.store.errors import VERIFY, StoreError, without_remedy
from teachonce.store.format.pairs import offsets_of
from teachonce.store.read.part import PartReader
from teachonce.store.read.store import FeatureStore
from teachonce.store.read.stored_tokenizer import encoded, within_bounds
from teachonce.store.tools.damaged import open_damaged
from teachonce.support.arrays import Array

BATCH = 256  # sequences that are tokenised at once
Run = tuple[int, int, int]
"""Index of a part, and the first and last of some of its sequences."""
Flaw = tuple[int, str, bool]
"""Index of a part, what is wrong, and whether the tokens could be read."""


def parts_with_other_tokens(store: FeatureStore, places: list[int]) -> list[tuple[int, str]]:
    """Return, by part index, a line for each part whose stored tokens differ from the stored
    tokenizer's. Raises StoreError for a tokenizer that exceeds its limits."""
    parts = [(place, store.manifest.parts[place].counts) for place in places]
    runs = [(place, 0, counts.sequences) for place, counts in parts]
    flaws = _flaws(store, runs, sum(counts.text_bytes for _, counts in parts))
    return [(place, line if read else without_remedy(line)) for place, line, read in flaws]


def _flaws(store: FeatureStore, runs: list[Run], text_bytes: int) -> list[Flaw]:
    """Return the runs whose stored tokens cannot be read, or differ from those of the tokenizer,
    which runs with bounds on time and memory."""
    found: list[Flaw] = within_bounds(
        store.teacher_file("tokenizer.json"),
        text_bytes,
        store.path,
        lambda: _flaws_here(store, runs),
        _flaws_of,
        *(store.path, store.source.options, runs),
    )
    return found


def _flaws_of(path: str, options: dict[str, Any] | None, runs: list[Run]) -> list[Flaw]:
    # `verify` calls this for damaged stores too, which `open_store` refuses, and a training with
    # --allow-partial for an unfinished one.
    with closing(open_damaged(path, options).store) as store:
        return _flaws_here(store, runs)


def _flaws_here(store: FeatureStore, runs: list[Run]) -> list[Flaw]:
    tokenizer, found = store.tokenizer(), list[Flaw]()
    for place, first, last in runs:
        part = store.part(place)
        try:
            line = other_tokens(part, tokenizer, first, last)
        except StoreError as error:
            found.append((place, str(error), False))
            continue
        if line:
            found.append((place, f"{part.where}: {line}", True))
    return found


def other_tokens(part: PartReader, tokenizer: Any, first: int, last: int) -> str | None:
    """Describe the sequences among first..last of a part for which `tokenizer` produces other
    tokens than the stored ones; None if there are none. Raises StoreError for more tokens than a
    text can have."""
    for low in range(first, last, BATCH):
        high = min(low + BATCH, last)
        edges = part.token_start[low : high + 1]
        columns = ("id", "begin", "end", "special")
        stored = np.stack([part.read(f"token/{c}", edges[0], edges[-1]) for c in columns], axis=1)
        texts, separator = part.texts(low, high), part.features.separator
        found = encoded(tokenizer, texts, part.where, separator)
        for number, (text, encoding) in enumerate(zip(texts, found, strict=True), low):
            left, right = part.token_start[number : number + 2] - edges[0]
            if not np.array_equal(_rows(encoding, text, separator), stored[left:right]):
                return (
                    f"the tokenizer does not give the stored tokens of sequence {number} of the"
                    f" part ({len(encoding.ids)} tokens now, {right - left} stored)"
                )
    return None


def _rows(encoding: Any, text: str, separator: str | None) -> Array:
    special = np.array(encoding.special_tokens_mask, bool)
    spans = offsets_of(encoding, text, separator)
    return np.column_stack([np.array(encoding.ids, np.int64), spans, special])


def check_tokens(store: FeatureStore, places: int = 8, sequences: int = 8) -> None:
    """Raise StoreError if stored tokens cannot be read, or are not those of the stored tokenizer.

    Checks `sequences` consecutive sequences at each of `places` positions, spread evenly over the
    store, with bounds on time and memory.
    """
    rows = np.unique(np.linspace(0, max(0, len(store) - 1), places).astype(int))
    edges = store.manifest.first
    of_parts = np.searchsorted(edges, rows, "right") - 1
    ends = np.minimum(rows + sequences, edges[of_parts + 1])
    runs = np.stack([of_parts, rows - edges[of_parts], ends - edges[of_parts]], axis=1).tolist()
    for _, found, read in _flaws(store, runs, len(rows) * sequences * store.features.max_length):
        if not read:
            raise StoreError(found)
        written, here = store.meta["software"].get("tokenizers"), version("tokenizers")
        remedy = f"written with tokenizers {written}, read with {here}: install that version"
        # Versions that are equal, or unknown, do not explain the difference.
        if written in (None, here):
            remedy = VERIFY
        raise StoreError(f"{found}; {remedy}, or dump again")
