"""Dumps a corpus that grew: copies the documents of a finished store, and runs the teacher over new
documents only.

A document is identified by a hash of its sequences and gold labels. So a document counts as new if
its text, its label or its tokens changed.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from teachonce.store import Features, FeatureStore, StoreWriter, open_store
from teachonce.store.format.identity import object_in
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.tools.copy import take_part
from teachonce.store.tools.document_hashes import document_numbers, stored_digests
from teachonce.store.tools.merge import fact_differences, facts, is_merged, may_differ
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.differences import ABSENT, describe_differences, differences, first_few
from teachonce.support.errors import UserError
from teachonce.support.packages import other_versions
from teachonce.teacher_dump.corpus.documents import Corpus, Document
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.versions import changes_no_value
from teachonce.teacher_dump.windows.sequences import window_digests
from teachonce.teacher_dump.windows.window import Window, count_tokens

# NumPy's dtype of the 16 bytes of `store.tools.document_hashes`: NumPy can sort it.
DIGEST = "S16"
# `merge` accepts stores that differ in these keys of the identity. A grown store must equal a whole
# dump of the grown corpus, which has one value for each key.
BOUND = frozenset({"arguments.seed", "arguments.stride", "mixed_vocab"})


@dataclass(frozen=True)
class Growth:
    """Holds the store of `--grow-from`, from which a dump starts.

    `gone` is the value of `--gone`: whether documents that are missing from the corpus are left out
    ("forget"), copied ("keep"), or an error (None).
    """

    store: FeatureStore
    gone: str | None

    @staticmethod
    @contextmanager
    def of(options: DumpOptions) -> Iterator[Growth | None]:
        """Open the store of --grow-from until the end of the `with` block; yield None without the
        option.

        Raises StoreError if the store is unfinished or damaged.
        """
        if options.grow_from is None:
            yield None
            return
        with closing(open_store(options.grow_from)) as store:
            # `feature-store forget` must find the new store: it holds texts of the old one.
            record_copy(store.source.address, store.manifest, "store", options.out)
            yield Growth(store, options.gone)

    def identity(self) -> dict[str, Any]:
        """Return `corpus.grown_from` of the grown store's identity."""
        corpus = self.store.identity.get("corpus")
        return {
            "content": self.store.manifest.content(),
            **({"merged": True} if is_merged(corpus) else {}),
            **({"gone": self.gone} if self.gone else {}),
            **({"corpora": _corpora(corpus)} if self.gone == "keep" else {}),
        }

    def check(self, identity: dict[str, Any], config: bytes, features: Features) -> None:
        """Raise UserError unless a dump with this identity, config.json and features would store
        the same values for a sequence as the old store."""
        then, now = facts(self.store), {**identity, "config": json.loads(config)}
        merged = is_merged(self.store.identity.get("corpus"))
        versions = other_versions(self.store.meta["software"])
        changes = [
            (key, old, new)
            for key, old, new in fact_differences(then, now)
            if key.split(".")[0] != "corpus"
            and key not in may_differ(features) - BOUND
            # `merge` leaves out arguments in which its stores differ: such a key is not a
            # difference.
            and not (merged and key not in BOUND and old == ABSENT)
            and not changes_no_value(key, ABSENT in (old, new), versions)
        ]
        # Older stores have the problem type in config.json alone, which `store.task` reads.
        stored = replace(self.store.features, task=self.store.task)
        changes += differences(stored.to_json(), features.to_json(), "features")
        if changes:
            raise UserError(
                f"--grow-from {self.store.path}: was made by another teacher or with other options:"
                f" {first_few(describe_differences(changes))}; use the store's teacher and options,"
                " or dump the whole corpus without --grow-from"
            )

    def compare(self, windows: Iterable[Window], say: Callable[[str], object]) -> CopyPlan:
        """Compare the windows of a corpus with the store: find new and missing documents.

        Equal documents are counted: if the corpus has three copies and the store two, one copy is
        new. Raises UserError if documents are missing and `gone` is None.
        """
        corpus = _DocumentHashes.of_windows(windows)
        stored = _DocumentHashes(stored_digests(self.store))
        matched, new = _match_hashes(stored.digests, corpus.digests)
        missing = stored.numbers[~matched]
        self._report(missing, int(new.sum()), len(corpus.numbers), say)
        dropped = np.unique(missing) if self.gone != "keep" else missing[:0]
        sequences, counts = {}, Counter[str]()
        for part, numbers in enumerate(document_numbers(self.store)):
            copied = ~np.isin(numbers, dropped)
            if copied.any():
                # None lets `take_part` link the files of a whole part; its values are not read.
                sequences[part] = None if copied.all() else copied
                counts.update(self._counts(part, copied))
        counts["parts"] = len(sequences)
        # Numbers of dropped documents are not used again.
        counts["documents"] = int(stored.numbers.max()) + 1
        counts["unused"] = counts["documents"] - (len(stored.numbers) - len(dropped))
        is_new = np.zeros(int(corpus.numbers.max(initial=-1)) + 1, bool)
        is_new[corpus.numbers[new]] = True
        return CopyPlan(self.store, sequences, is_new, int(corpus.tokens[new].sum()), counts)

    def _report(
        self, missing: Array, new: int, documents: int, say: Callable[[str], object]
    ) -> None:
        path = self.store.path
        say(f"{path}: has {documents - new:,} of the {counted(documents, 'document')}")
        say(f"new: {counted(new, 'document')}, which the teacher reads")
        if "forgotten" in object_in(self.store.identity, "corpus"):
            # The store lists numbers of forgotten documents and no hashes: a hash of a short text
            # could be inverted by guessing. So a forgotten document cannot be recognised here.
            say("documents were forgotten there: if the corpus still has them, they count as new")
        if not len(missing):
            return
        whose = f"{counted(len(missing), 'document')} of {path}"
        if self.gone is None:
            raise UserError(
                f"--grow-from: the corpus no longer has {whose}, removed or changed (the first is"
                f" number {missing[0]}); leave such documents out with --gone forget, or copy them"
                " with --gone keep"
            )
        done = "left out" if self.gone == "forget" else "copied"
        say(f"gone: {whose} not in the corpus: {done}")

    def _counts(self, part: int, copied: Array) -> Counter[str]:
        """Count the copied sequences of a part, with the keys that `parts.count` uses."""
        reader, task = self.store.part(part), self.store.features.task
        lengths = np.diff(reader.token_start)
        counts = Counter(sequences=int(copied.sum()), tokens=int(lengths[copied].sum()))
        if task:
            labels = reader.all(task.gold)
            rows = np.repeat(copied, lengths) if task.kind == "tagging" else copied
            counts["gold"] = int((labels[rows] >= 0).sum())
        return counts


@dataclass(frozen=True)
class CopyPlan:
    """Lists the sequences to copy from a store, and the documents of the corpus that are new.

    sequences: for each copied part, by its index in the store, bool [sequences] of the part to
        copy; None for all of them.
    is_new: bool [documents of the corpus].
    tokens: the number of tokens in new documents.
    counts: the counts of copied parts, sequences, tokens and gold labels. Its key `documents` is
        the number that the first new document gets; `unused` counts the numbers below it that no
        copied document has.
    """

    store: FeatureStore
    sequences: dict[int, Array | None]
    is_new: Array
    tokens: int
    counts: Counter[str]

    def documents(self, corpus: Corpus) -> Iterator[Document]:
        """Yield the new documents, numbered after the documents of the store."""
        number = self.counts["documents"]
        # Without new tokens the corpus is not read a second time.
        for document in corpus if self.tokens else ():
            # Documents behind the end of --limit were not compared.
            if document.number < len(self.is_new) and self.is_new[document.number]:
                yield replace(document, number=number)
                number += 1

    def copy(self, writer: StoreWriter, check: Callable[[], object]) -> None:
        """Publish the copied parts, numbered from 0; `check` is called before each part."""
        for number, (part, copied) in enumerate(self.sequences.items()):
            check()
            take_part(writer, number, self.store, part, copied)


class _DocumentHashes:
    """Holds hashes, numbers and token counts of documents, in their order."""

    def __init__(self, numbered: Iterable[tuple[int, bytes]]) -> None:
        # Flat buffers: number, digest and token count of a document take 32 bytes.
        numbers, digests = array("q"), bytearray()
        for number, digest in numbered:
            numbers.append(number)
            digests += digest
        self.numbers = np.frombuffer(numbers, np.int64)
        self.digests = np.frombuffer(digests, DIGEST)
        self.tokens = np.zeros(len(numbers), np.int64)

    @staticmethod
    def of_windows(windows: Iterable[Window]) -> _DocumentHashes:
        tokens = array("q")

        # By document: the windows of a whole corpus do not fit into memory.
        def digests() -> Iterator[tuple[int, bytes]]:
            for _, group in groupby(windows, attrgetter("document")):
                document = list(group)
                tokens.append(count_tokens(document))
                yield from window_digests(document)

        hashes = _DocumentHashes(digests())
        hashes.tokens = np.frombuffer(tokens, np.int64)
        return hashes


def _corpora(corpus: Any) -> list[Any]:
    """List the corpora of which a store was made, the oldest first: --grow-from adds a corpus each
    time. `corpus` is the entry `corpus` of the store's identity."""
    parent = corpus.get("grown_from") if isinstance(corpus, dict) else None
    if not isinstance(parent, dict):
        return [corpus]
    earlier = parent.get("corpora")
    grown_from = {key: value for key, value in parent.items() if key != "corpora"}
    # Flat: otherwise each growth would nest the identity one level deeper.
    return [*(earlier if isinstance(earlier, list) else []), {**corpus, "grown_from": grown_from}]


def _match_hashes(stored: Array, corpus: Array) -> tuple[Array, Array]:
    """Pair equal hashes one to one: the first copy in `stored` with the first copy in `corpus`, the
    second with the second.

    Returns which hashes in `stored` have a partner, bool [stored], and which hashes in `corpus`
    have no partner, bool [corpus].
    """
    ranks = [_occurrences(side) for side in (stored, corpus)]
    _, inverse = np.unique(np.concatenate([stored, corpus]), return_inverse=True)
    sides = inverse[: len(stored)], inverse[len(stored) :]
    counts = [np.bincount(side, minlength=len(inverse)) for side in sides]
    return ranks[0] < counts[1][sides[0]], ranks[1] >= counts[0][sides[1]]


def _occurrences(hashes: Array) -> Array:
    """Count, for each of n hashes, the equal hashes before it: int64 [n]."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.searchsorted(ordered, ordered)
    counts = np.empty(len(hashes), np.int64)
    counts[order] = np.arange(len(hashes)) - first
    return counts
