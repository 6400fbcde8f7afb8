"""A dump of a corpus that grew: what a finished store has of it is taken over, and the teacher
reads the rest.

A document is known by a hash of the sequences that are cut of it, gold labels included. So whatever
would be stored otherwise is new: another text, another label, another tokenizer.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.store import Features, FeatureStore, StoreWriter, open_store
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.tools.copy import take_part
from teachonce.store.tools.documents import document_numbers, stored_digests
from teachonce.store.tools.merge import fact_differences, facts, free, is_merged
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.differences import ABSENT, differences, first_few
from teachonce.support.errors import UserError
from teachonce.support.installed import other_versions
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.versions import idle
from teachonce.teacher_dump.windows.sequences import window_digests
from teachonce.teacher_dump.windows.window import Window

if TYPE_CHECKING:
    from teachonce.store.format.features import Calibration

DIGEST = "S16"
BOUND = frozenset({"arguments.seed", "arguments.stride", "mixed_vocab"})
"""Keys of the identity that may differ in stores that are merged, and not here: a whole dump of the
grown corpus would have one of each."""


class Growth:
    """The store that a dump begins with, and what becomes of the documents that are `gone`: that
    the corpus does not have any more."""

    def __init__(self, store: FeatureStore, gone: str | None) -> None:
        self.store, self.gone = store, gone

    @staticmethod
    @contextmanager
    def of(options: DumpOptions) -> Iterator[Growth | None]:
        """Open the store that the options name until the end of the block; None where they name
        none. Raises StoreError for one that is unfinished or damaged."""
        if options.grow_from is None:
            yield None
            return
        with closing(open_store(options.grow_from)) as store:
            record_copy(store.path, store.manifest, "store", options.out)
            yield Growth(store, options.gone)

    def identity(self) -> dict[str, Any]:
        """Describe, for the identity of a grown store, the store that it grew from."""
        corpus = self.store.identity.get("corpus")
        return {
            "content": self.store.manifest.content(),
            **({"merged": True} if is_merged(corpus) else {}),
            **({"gone": self.gone} if self.gone else {}),
            **({"corpora": _corpora(corpus)} if self.gone == "keep" else {}),
        }

    def check(self, identity: dict[str, Any], config: bytes, features: Features) -> None:
        """Raise UserError unless a dump of this identity, with the teacher's `config`.json, and of
        these features keeps of a sequence what the store keeps of it."""
        then, now = facts(self.store), {**identity, "config": json.loads(config)}
        merged = is_merged(self.store.identity.get("corpus"))
        versions = other_versions(self.store.meta["software"])
        found = [
            (key, old, new)
            for key, old, new in fact_differences(then, now)
            if key.split(".")[0] != "corpus"
            and key not in free(features) - BOUND
            and not (merged and key not in BOUND and old == ABSENT)
            and not idle(key, ABSENT in (old, new), versions)
        ]
        stored = replace(self.store.features, task=self.store.task)
        found += differences(stored.to_json(), features.to_json(), "features")
        if found:
            differ = [f"{key} is {old} there and {new} now" for key, old, new in found]
            raise UserError(
                f"--grow-from {self.store.path}: was made by another teacher or other options:"
                f" {first_few(differ)}; give those of that store, or dump the whole corpus without"
                " --grow-from"
            )

    @property
    def calibration(self) -> Calibration:
        return self.store.calibration

    def words(self) -> WordCounts | None:
        """Return the counts by which the store masks rare words more often; None if it has none."""
        return WordCounts.stored(self.store)

    def compare(self, windows: Iterable[Window], say: Callable[[str], object]) -> Takeover:
        """Find out which documents of a corpus, given by its windows, the store does not have, and
        which of its own the corpus does not have; equal documents are counted.

        Raises UserError where some are gone, and nothing was said of those.
        """
        corpus = _Documents.of_windows(windows)
        stored = _Documents(stored_digests(self.store))
        old, new = _both(stored.digests, corpus.digests)
        gone = set() if self.gone == "keep" else set(stored.numbers[~old].tolist())
        self._tell(stored.numbers[~old], int(new.sum()), len(corpus.numbers), say)
        keep, kept = {}, Counter[str]()
        lost = np.array(sorted(gone), np.int64)
        for place, numbers in enumerate(document_numbers(self.store)):
            stays = ~np.isin(numbers, lost)
            if stays.any():
                keep[place] = None if stays.all() else stays
                kept.update(self._counts(place, stays))
        kept["parts"] = len(keep)
        kept["documents"] = int(stored.numbers.max()) + 1
        fresh = np.zeros(int(corpus.numbers.max(initial=-1)) + 1, bool)
        fresh[corpus.numbers[new]] = True
        return Takeover(self.store, keep, fresh, int(corpus.tokens[new].sum()), kept)

    def _tell(self, gone: Array, new: int, documents: int, say: Callable[[str], object]) -> None:
        path = self.store.path
        say(f"{path}: has {documents - new:,} of the {counted(documents, 'document')}")
        say(f"new: {counted(new, 'document')}, which the teacher reads")
        if "forgotten" in (self.store.identity.get("corpus") or {}):
            say("documents were forgotten there: those that the corpus still has count as new")
        if not len(gone):
            return
        whose = f"{counted(len(gone), 'document')} of {path}"
        if self.gone is None:
            raise UserError(
                f"--grow-from: {whose} not in the corpus, removed or changed (the first is number"
                f" {gone[0]}); leave them out with --gone forget, or take them over with --gone"
                " keep"
            )
        done = "left out" if self.gone == "forget" else "taken over"
        say(f"gone: {whose}, which the corpus does not have: {done}")

    def _counts(self, place: int, stays: Array) -> Counter[str]:
        """Count what stays of a part, as a dump counts what it makes."""
        reader, task = self.store.part(place), self.store.features.task
        lengths = np.diff(reader.token_start)
        found = Counter(sequences=int(stays.sum()), tokens=int(lengths[stays].sum()))
        if task:
            labels = reader.all(task.gold)
            chosen = np.repeat(stays, lengths) if task.kind == "tagging" else stays
            found["gold"] = int((labels[chosen] >= 0).sum())
        return found


@dataclass(frozen=True)
class Takeover:
    """What is taken over of a store, and what is new.

    keep: of each of its parts that is taken over, by its place, which sequences; None for all.
    fresh: bool [documents of the corpus], which of them are new. tokens: of these.
    kept: the counts of what is taken over.
    """

    store: FeatureStore
    keep: dict[int, Array | None]
    fresh: Array
    tokens: int
    kept: Counter[str]

    def documents(self, corpus: Corpus) -> Iterator[Document]:
        """Yield the new documents, numbered after those that the store has."""
        number = self.kept["documents"]
        for document in corpus if self.tokens else ():
            if document.number < len(self.fresh) and self.fresh[document.number]:
                yield replace(document, number=number)
                number += 1

    def take(self, writer: StoreWriter, check: Callable[[], object]) -> None:
        """Publish what is taken over; `check` is called before each part."""
        for number, (place, keep) in enumerate(self.keep.items()):
            check()
            take_part(writer, number, self.store, place, keep)


class _Documents:
    """Hashes, numbers and lengths of documents, in their order: 32 bytes for each."""

    def __init__(self, found: Iterable[tuple[int, bytes]]) -> None:
        numbers, digests = array("q"), bytearray()
        for number, digest in found:
            numbers.append(number)
            digests += digest
        self.numbers = np.frombuffer(numbers, np.int64)
        self.digests = np.frombuffer(digests, DIGEST)
        self.tokens = np.zeros(len(numbers), np.int64)

    @staticmethod
    def of_windows(windows: Iterable[Window]) -> _Documents:
        tokens, last = array("q"), -1

        def seen() -> Iterator[Window]:
            nonlocal last
            for window in windows:
                if window.document != last:
                    last = window.document
                    tokens.append(0)
                tokens[-1] += len(window.ids)
                yield window

        found = _Documents(window_digests(seen()))
        found.tokens = np.frombuffer(tokens, np.int64)
        return found


def _corpora(corpus: Any) -> list[Any]:
    """List the corpora of which a store holds all that it was given: its own, and those that it has
    kept when it grew, so that nothing is nested deeper with each growth."""
    before = corpus.get("grown_from") if isinstance(corpus, dict) else None
    if not isinstance(before, dict):
        return [corpus]
    kept = before.get("corpora")
    own = {key: value for key, value in before.items() if key != "corpora"}
    return [*(kept if isinstance(kept, list) else []), {**corpus, "grown_from": own}]


def _both(stored: Array, corpus: Array) -> tuple[Array, Array]:
    """Pair equal hashes, each with one of the other side: bool, which of the stored have such a
    partner, and which of the corpus have none."""
    ranks = [_ranks(side) for side in (stored, corpus)]
    _, inverse = np.unique(np.concatenate([stored, corpus]), return_inverse=True)
    sides = inverse[: len(stored)], inverse[len(stored) :]
    counts = [np.bincount(side, minlength=len(inverse)) for side in sides]
    return ranks[0] < counts[1][sides[0]], ranks[1] >= counts[0][sides[1]]


def _ranks(hashes: Array) -> Array:
    """How many equal ones stand before each: int64 [n]."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.searchsorted(ordered, ordered)
    found = np.empty(len(hashes), np.int64)
    found[order] = np.arange(len(hashes)) - first
    return found
