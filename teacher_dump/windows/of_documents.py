"""Cuts documents into the sequences that a store of some features has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from teachonce.store import Features, FeatureStore
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import iter_windows, prompted
from teachonce.teacher_dump.windows.pairs import iter_pairs, whole_pairs
from teachonce.teacher_dump.windows.parallel import iter_parallel
from teachonce.teacher_dump.windows.window import Window


def windows_of(
    documents: Iterable[Document],
    tokenizer: Any,
    features: Features,
    stride: int,
    counters: Counter[str] | None = None,
    parallel: bool = False,
) -> Iterator[Window]:
    """Yield the windows of all documents in order, without numbers of labels; see `iter_windows`
    and `iter_pairs`, and for documents of two `parallel` texts `iter_parallel`."""
    task, vector, length = features.task, features.embedding, features.max_length
    if vector and parallel:
        return iter_parallel(documents, tokenizer, length, vector.prompt, counters)
    if features.separator is None:
        return iter_windows(
            prompted(documents, vector.prompt) if vector else documents,
            tokenizer,
            length,
            stride,
            counters,
            one_each=bool(vector or (task and task.kind == "classification")),
        )
    if task and task.scores:
        documents = whole_pairs(documents, features.separator, "a score is of both")
    return iter_pairs(documents, tokenizer, length, features.separator, counters)


def windows_as_in(store: FeatureStore, documents: Iterable[Document]) -> Iterator[Window]:
    """Yield the windows that a store would have of documents, by the tokenizer that it keeps.

    Raises UserError for a merged store of which nothing tells how its documents were cut.
    """
    arguments = store.identity.get("arguments")
    stride = arguments.get("stride") if isinstance(arguments, dict) else None
    if not isinstance(stride, int):
        raise UserError(
            f"{store.path}: does not tell how its documents were cut (--stride), so texts cannot be"
            " found in it; give numbers of documents or hashes of their texts"
        )
    return windows_of(documents, _Stored(store.tokenizer()), store.features, stride)


@dataclass(frozen=True)
class _Stored:
    """A stored tokenizer in the place of one of transformers."""

    backend_tokenizer: Any
    is_fast: bool = True
