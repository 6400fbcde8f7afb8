"""Identify the documents of a store by hashes of their sequences."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np

from teachonce.store.format.features import TaskSpec
from teachonce.store.read.part import PartReader
from teachonce.store.read.store import FeatureStore
from teachonce.support.arrays import Array

# Among a billion documents, two share a hash of 128 bits with a probability of 10^-21.
DIGEST = 16  # bytes
COLUMNS = ("id", "begin", "end", "special")  # of tokens


def sequence_digest(
    document_begin: int,
    hard_cut: bool,
    text: str,
    columns: Iterable[Array],
    gold: Array | None,
) -> bytes:
    """Hash a sequence: the text, where it begins in its document, and its tokens.

    `columns` are id uint32, begin and end int32 and special bool, each [T]; `gold` int32 holds the
    numbers of the gold label [1] or tags [T]; None to leave them out.
    """
    data = text.encode()
    # The length is hashed, too: otherwise another text and tokens could join to the same bytes.
    hasher = hashlib.blake2b(
        struct.pack("<qq?", document_begin, len(data), hard_cut), digest_size=DIGEST
    )
    hasher.update(data)
    for values in (*columns, *([] if gold is None else [gold])):
        # A window passes the columns of its offsets [T, 2], which are not contiguous.
        hasher.update(np.ascontiguousarray(values).data)
    return hasher.digest()


def document_digests(sequences: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, hash) for each document. `sequences` are (document number, hash) of each
    sequence, in order."""
    for number, group in groupby(sequences, itemgetter(0)):
        yield number, hashlib.blake2b(b"".join(d for _, d in group), digest_size=DIGEST).digest()


def stored_digests(store: FeatureStore, gold: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield (number, hash) of the documents of a store; with `gold`, labels are hashed as well.

    Raises StoreError for an array that does not match its checksum.
    """
    return document_digests(
        pair
        for index in range(len(store.manifest.parts))
        for pair in _sequences(store.part(index), store.features.task if gold else None)
    )


def _sequences(part: PartReader, task: TaskSpec | None) -> Iterator[tuple[int, bytes]]:
    documents, begin, cut = (
        part.all(f"sequence/{name}").tolist() for name in ("document", "document_begin", "hard_cut")
    )
    part.all("text/utf8")  # compares it with its checksum
    columns = [part.all(f"token/{name}") for name in COLUMNS]
    gold = part.all(task.gold) if task else None
    edges = part.token_start.tolist()
    for i, text in enumerate(part.texts(0, len(documents))):
        first, last = edges[i], edges[i + 1]
        labels = None
        if task and gold is not None:
            labels = gold[first:last] if task.kind == "tagging" else gold[i : i + 1]
        tokens = (column[first:last] for column in columns)
        yield documents[i], sequence_digest(begin[i], cut[i], text, tokens, labels)


def document_texts(store: FeatureStore) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the documents of a store, joined from their sequences, without the
    prompt. The overlap of two windows occurs once."""
    prompt = store.features.embedding.prompt if store.features.embedding else ""
    for number, pieces in groupby(_pieces(store), itemgetter(0)):
        texts, length = list[str](), 0
        for _, begin, text in pieces:
            # Only the end is cut: a copy of the whole for each window took 98 s for 8 MB.
            while length > begin:
                last = texts.pop()
                length -= len(last)
                if length < begin:
                    texts.append(last[: begin - length])
                    length = begin
            texts.append(text)
            length += len(text)
        yield number, "".join(texts).removeprefix(prompt)


def _pieces(store: FeatureStore) -> Iterator[tuple[int, int, str]]:
    for index, part in enumerate(store.manifest.parts):
        reader = store.part(index)
        documents = reader.document.tolist()
        begins = reader.all("sequence/document_begin").tolist()
        yield from zip(documents, begins, reader.texts(0, part.counts.sequences), strict=True)


def document_numbers(store: FeatureStore) -> Iterator[Array]:
    """Yield, for each part, the document number int64 [n] of each of its sequences."""
    for index in range(len(store.manifest.parts)):
        yield store.part(index).document
