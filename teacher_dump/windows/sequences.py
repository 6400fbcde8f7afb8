"""Makes sequences of a store from documents: windows of texts, of pairs, of parallel texts.

The two texts of a pair are one window, which the teacher reads as one input. For parallel texts,
such as a sentence and its translation, the window has the student's text and the token ids of the
teacher's text. Pairs and parallel texts are truncated, not divided into windows, because a label or
vector belongs to the whole text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teachonce.store import Features, FeatureStore
from teachonce.store.format.pairs import SEPARATOR, has_pair_form, split_pair
from teachonce.store.tools.documents import document_digests, sequence_digest
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import (
    SEGMENT,
    document_batches,
    fast_backend,
    iter_windows,
)
from teachonce.teacher_dump.windows.truncating import Truncation, iter_truncated
from teachonce.teacher_dump.windows.window import Window, make_window, storable


def windows_of(
    documents: Iterable[Document],
    tokenizer: Any,
    features: Features,
    stride: int,
    counters: Counter[str] | None = None,
    parallel: bool = False,
) -> Iterator[Window]:
    """Yield the windows of all documents in order, without label ids.

    Dispatches to `iter_windows`, `iter_truncated`, `iter_pairs`, or with `parallel` to
    `iter_parallel`.
    """
    task, vector, length = features.task, features.embedding, features.max_length
    if vector and parallel:
        return iter_parallel(documents, tokenizer, length, vector.prompt, counters)
    if features.separator is None and (vector or (task and task.kind == "classification")):
        prompt = vector.prompt if vector else ""
        return iter_truncated(documents, tokenizer, length, prompt, counters)
    if features.separator is None:
        return iter_windows(documents, tokenizer, length, stride, counters)
    if task and task.is_score:
        documents = whole_pairs(documents, features.separator, "a score needs both")
    return iter_pairs(documents, tokenizer, length, features.separator, counters)


def windows_as_in(store: FeatureStore, documents: Iterable[Document]) -> Iterator[Window]:
    """Yield the windows of documents as a store would hold them, with the store's tokenizer.

    Raises UserError for a merged store, which does not record how its documents were cut.
    """
    arguments = store.identity.get("arguments")
    stride = arguments.get("stride") if isinstance(arguments, dict) else None
    if not isinstance(stride, int):
        raise UserError(
            f"{store.path}: does not record how its documents were cut (--stride), so texts cannot"
            " be found in it; give numbers of documents or hashes of their texts"
        )
    side = store.teacher_settings("tokenizer_config.json").get("truncation_side", "right")
    return windows_of(documents, _StoredTokenizer(store.tokenizer(), side), store.features, stride)


@dataclass(frozen=True)
class _StoredTokenizer:
    """A stored tokenizer with the attributes of a transformers tokenizer that are used here."""

    backend_tokenizer: Any
    truncation_side: Any
    is_fast: bool = True


def iter_pairs(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    separator: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield a window of at most `max_length` tokens for each document, whose two texts `separator`
    divides.

    If a pair is too long, its longer text is truncated until both have equally many tokens, then
    both (`longest_first` of tokenizers), each by `Truncation`. `counters` is filled like in
    `iter_windows`. Raises UserError for a slow tokenizer, for one that puts no token between two
    texts, for a `max_length` that is too small, and for a character that alone does not fit.
    """
    backend = fast_backend(tokenizer)
    if not has_pair_form(backend):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"tokenizer {name}: puts no token between the two texts of a pair (its template has no"
            " form for pairs); give one column as --text-column, or a teacher that reads pairs"
        )
    specials = backend.num_special_tokens_to_add(is_pair=True)
    if max_length < specials + 2:
        raise UserError(
            f"--max-length {max_length}: expected at least {specials + 2} "
            f"({specials} special tokens and one token of each text)"
        )
    fit = _PairTruncation(Truncation.of(tokenizer), max_length, specials, separator)
    tally = Counter[str]() if counters is None else counters
    for batch in document_batches(documents):
        for window in fit.windows(batch, tally):
            if window.special.all():
                tally["no_tokens"] += 1
            else:
                yield window


def whole_pairs(documents: Iterable[Document], separator: str, why: str) -> Iterator[Document]:
    """Yield the documents; raise UserError for a pair with an empty text. `why`, a part of the
    message, explains why both texts are needed."""
    for document in documents:
        for text, side in zip(
            split_pair(document.text, separator, document.source), ("first", "second"), strict=True
        ):
            if not text or text.isspace():
                raise UserError(
                    f"{document.source}: the {side} text of pair {document.number + 1} is empty"
                    f" ({document.text.replace(separator, ' | ')!r:.60}), and {why};"
                    " fill it in, or remove the row"
                )
        yield document


class _PairTruncation:
    """Truncates pairs to `max_length` tokens, of which `specials` are special tokens."""

    def __init__(
        self, truncation: Truncation, max_length: int, specials: int, separator: str
    ) -> None:
        self._truncation, self._encode = truncation, truncation.encode
        self._max_length = max_length
        self._budget, self._separator = max_length - specials, separator

    def windows(self, documents: list[Document], counters: Counter[str]) -> Iterator[Window]:
        texts = [storable(document.text, counters) for document in documents]
        pairs = [
            split_pair(t, self._separator, d.source) for t, d in zip(texts, documents, strict=True)
        ]
        short = [i for i, pair in enumerate(pairs) if max(map(len, pair)) <= SEGMENT]
        encodings = dict(zip(short, self._encode([pairs[i] for i in short]), strict=True))
        for i, document in enumerate(documents):
            lost = 0
            if i not in encodings or len(encodings[i]) > self._max_length:
                cut = self._cut(pairs[i], document)
                text, encodings[i] = self._separator.join(cut), self._encode([cut])[0]
                lost, texts[i] = len(texts[i]) - len(text), text
            window = make_window(
                texts[i], document.number, 0, False, encodings.pop(i), self._separator
            )
            yield replace(window, gold=document.gold, lost=lost)

    def _cut(self, pair: tuple[str, ...], document: Document) -> tuple[str, ...]:
        """Truncate the texts of a pair, the longer one first, until they fit."""
        # Counts above half of the budget need not be exact: the beginning of a long text suffices.
        heads = self._encode([text[:SEGMENT] for text in pair])
        counts = [len(head) - sum(head.special_tokens_mask) for head in heads]
        shorter = min(min(counts), self._budget // 2)
        longer = self._budget - shorter
        first_is_longer = counts[0] > counts[1]
        budgets = (longer, shorter) if first_is_longer else (shorter, longer)
        each = zip(pair, heads, budgets, strict=True)
        return tuple(self._beginning(text, head, budget, document) for text, head, budget in each)

    def _beginning(self, text: str, head: Any, budget: int, document: Document) -> str:
        """Truncate a text to `budget` tokens; `head` is the encoding of its first SEGMENT
        characters."""
        whole = head if len(text) <= SEGMENT else None
        begin, end = self._truncation.checked_span(text, budget, whole, document)
        return text[begin:end]


def iter_parallel(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    prompt: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield a window for the second text of each document, with the token ids of the first text as
    `Window.read`. Each text has at most `max_length` tokens; `prompt` is put before both.

    `counters` is filled like in `iter_windows`, but `no_tokens` counts texts. Raises UserError like
    `iter_windows`, and for an empty text.
    """
    for batch in document_batches(whole_pairs(documents, SEPARATOR, "one is of no use alone")):
        first, second = (
            iter_truncated(_sides(batch, side), tokenizer, max_length, prompt, counters)
            for side in (0, 1)
        )
        # By number: a text without tokens has no window, and its pair is left out.
        read = {window.document: window for window in first}
        for window in second:
            if other := read.get(window.document):
                yield replace(window, read=other.ids, lost=window.lost + other.lost)


def _sides(documents: list[Document], side: int) -> Iterator[Document]:
    for document in documents:
        yield replace(document, text=split_pair(document.text, SEPARATOR, document.source)[side])


def window_digests(windows: Iterable[Window], gold: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield (number, hash) of each document, as in `store.tools.documents`. With `gold` the hash
    covers the label ids, too."""
    return document_digests((window.document, _digest(window, gold)) for window in windows)


def _digest(window: Window, gold: bool) -> bytes:
    offsets = window.offsets.astype(np.int32)
    columns = (window.ids.astype(np.uint32), *offsets.T, window.special)
    return sequence_digest(
        window.document_begin,
        window.hard_cut,
        window.text,
        columns,
        window.numbers if gold else None,
    )
