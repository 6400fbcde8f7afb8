"""Word counts of a corpus, with which `--mask-words rare` masks rare words more often.

See FORMAT.md, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from teachonce.store.containers.paths import staging_of
from teachonce.store.errors import StoreError
from teachonce.store.format.manifest import DAMAGED
from teachonce.store.read.manifests import listed_outside, missing_outside, read_outside
from teachonce.support.arrays import Array

if TYPE_CHECKING:
    from teachonce.store.read.store import FeatureStore

GROUP = "calibration/words"
TEXT, COUNT = f"{GROUP}/text", f"{GROUP}/count"
LEAST = 2  # smallest count that is stored: half of all words occur once


@dataclass(frozen=True)
class WordCounts:
    """Holds the counts of the words that occur at least twice; any other word counts as 1."""

    counts: Mapping[str, int]

    def of(self, words: list[str]) -> Array:
        """Return the counts of n words: int64 [n]."""
        return np.array([self.counts.get(word, 1) for word in words], np.int64)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store, by path."""
        words = sorted(word for word, count in self.counts.items() if count >= LEAST)
        text = "".join(f"{word}\n" for word in words).encode()
        return {
            TEXT: np.frombuffer(text, np.uint8),
            COUNT: np.array([self.counts[word] for word in words], np.int64),
        }

    @staticmethod
    def stored(store: FeatureStore) -> WordCounts | None:
        """Read and check the counts of a store; None if it has none.

        Raises StoreError if they are damaged.
        """
        return _read(store.manifest.arrays, store.outside, store.path)

    @staticmethod
    def unfinished(path: str | Path) -> WordCounts | None:
        """Read and check the counts of an unfinished store; None if it has none, or if one of their
        arrays is missing. Raises StoreError like `stored`."""
        with closing(staging_of(path).source()) as source:
            entries = listed_outside(source)
            # Lost, or quarantined by `repair`: a dump then counts the words again.
            if not {TEXT, COUNT}.isdisjoint(missing_outside(source, entries)):
                return None
            return _read(entries, partial(read_outside, source, entries), source.path)


def _read(names: Collection[str], read: Callable[[str], Array], where: str) -> WordCounts | None:
    if not any(name.startswith(f"{GROUP}/") for name in names):
        return None
    text, count = read(TEXT), read(COUNT)
    try:
        words = text.tobytes().decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise StoreError(f"{where}: {TEXT} is not UTF-8; {DAMAGED}") from error
    kind = (text.dtype.name, count.dtype.name, count.shape)
    if kind != ("uint8", "int64", (len(words),)) or (count < LEAST).any():
        raise StoreError(
            f"{where}: {COUNT} is not int64 [{len(words)}] of {LEAST} or more, one for each word of"
            f" {TEXT}; {DAMAGED}"
        )
    # Words that ascend are different, as FORMAT.md, section 6, requires.
    if any(word >= following for word, following in pairwise(words)):
        raise StoreError(f"{where}: the words of {TEXT} are not in ascending order; {DAMAGED}")
    return WordCounts(dict(zip(words, count.tolist(), strict=True)))
