"""Makes sequences of a store from documents: windows of texts, of pairs, of parallel texts.

The two texts of a pair are one window, which the teacher reads as one input. For parallel texts,
such as a sentence and its translation, the window has the student's text and the token ids of the
teacher's text.

Pairs, parallel texts, and texts with one label or vector are truncated, not divided into windows,
because a label or vector belongs to the whole text. They are truncated to the tokens of
transformers' `truncation=True`. The text of a sequence, tokenized alone, must give its stored
tokens. So a text is cut where a token ends, if need be inside a word. If a token covers only part
of a character, the cut is before this character, and the text has a few tokens fewer than in
transformers. With `truncation_side` left, most tokenizers tokenize the rest of a word differently
than in the whole word: the text then begins at the next word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from teachonce.store import Features, FeatureStore
from teachonce.store.format.sequences import SEPARATOR, has_pair_form, spans_of, split_pair
from teachonce.store.tools.document_hashes import document_digests, sequence_digest
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import (
    SEGMENT,
    checked_budget,
    document_batches,
    encoder,
    fast_backend,
    iter_windows,
)
from teachonce.teacher_dump.windows.masked_views import maskable_spans
from teachonce.teacher_dump.windows.window import Window, make_window, storable

TRIES = 16  # cuts to try for transformers' tokens, before a cut with other tokens is accepted
SPARE = 64  # a tokenized stretch of a long text has more tokens than the budget and these


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
    # With the attributes of a transformers tokenizer that are used here.
    tokenizer = SimpleNamespace(
        backend_tokenizer=store.tokenizer(), truncation_side=side, is_fast=True
    )
    return windows_of(documents, tokenizer, store.features, stride)


@dataclass(frozen=True)
class Truncation:
    """Truncates single texts with a tokenizer.

    `encode` takes a list of texts. With `left` (`truncation_side` of tokenizer_config.json) the
    beginning of a text is cut off.
    """

    encode: Callable[[list[Any]], list[Any]]
    left: bool = False

    @staticmethod
    def of(tokenizer: Any) -> Truncation:
        """Make the truncation of a transformers tokenizer. Raises UserError for a slow one."""
        side = getattr(tokenizer, "truncation_side", "right")
        return Truncation(encoder(fast_backend(tokenizer)), side == "left")

    def span(
        self, text: str, budget: int, whole: Any = None, prompt: int = 0
    ) -> tuple[int, int] | None:
        """Find (begin, end) of the longest part of a text that has at most `budget` tokens.

        `whole` is the encoding of the text, if it exists already. Returns None if no character
        after the first `prompt` characters fits.
        """
        ids, begin, end = self._tokens(text, budget, whole)
        if len(ids) <= budget:
            return 0, len(text)
        fitting = None
        for count in range(budget, 0, -1):
            if self.left:
                position = int(end[len(ids) - count - 1])
                span, expected = (position, len(text)), ids[len(ids) - count :]
            else:
                # Tokens that are parts of one character all have the span of this character.
                position = int(min(end[count - 1], begin[count]))
                span, expected = (0, position), ids[:count]
            stretch = text[span[0] : span[1]]
            if not stretch[prompt:].strip():
                break
            stretch_ids = self._ordinary(self.encode([stretch])[0])[0]
            size = min(len(stretch_ids), count)
            if np.array_equal(stretch_ids, expected[-size:] if self.left else expected[:size]):
                return span
            fitting = fitting or (span if 0 < len(stretch_ids) <= budget else None)
            if fitting and budget - count >= TRIES:
                break
        return fitting

    def checked_span(
        self, text: str, budget: int, whole: Any, document: Document, prompt: str = ""
    ) -> tuple[int, int]:
        """Find the `span` of a document's text. Raises UserError if no character fits."""
        span = self.span(text, budget, whole, len(prompt))
        if span is None:
            room = f" after the prompt {prompt!r:.60}" if prompt else ""
            raise UserError(
                f"{document.source}: no character of text {document.number + 1} fits into the"
                f" {budget} tokens that --max-length leaves{room}; give a larger --max-length"
            )
        return span

    def _tokens(self, text: str, budget: int, encoding: Any) -> tuple[Array, Array, Array]:
        """Return ids, begins and ends of tokens, starting at the side of the text that is not
        truncated."""
        reach = SEGMENT
        while True:
            stretch = text[-reach:] if self.left else text[:reach]
            tokens = self._ordinary(encoding or self.encode([stretch])[0])
            if encoding or len(stretch) == len(text) or len(tokens[0]) > budget + SPARE:
                break
            reach *= 4
        ids, offsets = tokens
        offsets += len(text) - len(stretch) if self.left and not encoding else 0
        # A normalizer may swap characters: make the spans ascend.
        begin, end = np.maximum.accumulate(offsets, axis=0).T
        return ids, begin, end

    @staticmethod
    def _ordinary(encoding: Any) -> tuple[Array, Array]:
        ordinary = ~np.array(encoding.special_tokens_mask, bool)
        offsets = spans_of([encoding]).astype(np.int64)
        return np.array(encoding.ids, np.int64)[ordinary], offsets[ordinary]


@dataclass(frozen=True)
class _Truncated:
    """Truncates documents to one window each.

    budget: tokens of text in a window of `max_length`. prompt: put before each text. separator:
    divides the two texts of a pair, which share the budget; None for single texts. tally: counts
    windows left out (`no_tokens`) and characters replaced (`surrogates`).
    """

    truncation: Truncation
    max_length: int
    budget: int
    tally: Counter[str]
    prompt: str = ""
    separator: str | None = None

    def windows(self, documents: Iterable[Document]) -> Iterator[Window]:
        for batch in document_batches(documents):
            texts = [storable(self.prompt + document.text, self.tally) for document in batch]
            inputs = [self._sides(text, d) for text, d in zip(texts, batch, strict=True)]
            # `Truncation._tokens` tokenizes only the part of a longer text that the cut needs.
            short = [i for i, sides in enumerate(inputs) if max(map(len, sides)) <= SEGMENT]
            encodings = dict(zip(short, self._encode([inputs[i] for i in short]), strict=True))
            for i, document in enumerate(batch):
                sides, begin, encoding = inputs[i], 0, encodings.pop(i, None)
                if encoding is None or len(encoding) > self.max_length:
                    sides, begin = self._cut(sides, encoding, document)
                    (encoding,) = self._encode([sides])
                text, hard = (self.separator or "").join(sides), _inside(texts[i], begin)
                window = make_window(text, document.number, begin, hard, encoding, self.separator)
                if window.special.all():
                    self.tally["no_tokens"] += 1
                else:
                    lost = len(texts[i]) - len(text)
                    yield replace(window, lost=lost, gold=document.gold)

    def _sides(self, text: str, document: Document) -> tuple[str, ...]:
        return split_pair(text, self.separator, document.source) if self.separator else (text,)

    def _encode(self, inputs: list[tuple[str, ...]]) -> list[Any]:
        return self.truncation.encode(inputs if self.separator else [text for (text,) in inputs])

    def _cut(
        self, sides: tuple[str, ...], encoding: Any, document: Document
    ) -> tuple[tuple[str, ...], int]:
        """Truncate a text, or the texts of a pair, the longer text first. Return the truncated
        texts, and the position in the document at which the first of them begins."""
        cut = self.truncation
        if len(sides) == 1:
            begin, end = cut.checked_span(sides[0], self.budget, encoding, document, self.prompt)
            return (sides[0][begin:end],), begin
        # Counts above half of the budget need not be exact: the beginning of a long text suffices.
        heads = cut.encode([text[:SEGMENT] for text in sides])
        counts = [len(head) - sum(head.special_tokens_mask) for head in heads]
        shorter = min(min(counts), self.budget // 2)
        longer = self.budget - shorter
        budgets = (longer, shorter) if counts[0] > counts[1] else (shorter, longer)
        spans = [
            cut.checked_span(text, budget, head if len(text) <= SEGMENT else None, document)
            for text, head, budget in zip(sides, heads, budgets, strict=True)
        ]
        parts = (text[begin:end] for text, (begin, end) in zip(sides, spans, strict=True))
        return tuple(parts), spans[0][0]


def iter_truncated(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    prompt: str = "",
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield one window of at most `max_length` tokens for each document, with `prompt` before its
    text.

    `counters` is filled like in `iter_windows`. Raises UserError like `iter_windows`, and if the
    prompt leaves no room for a text.
    """
    cut, budget = Truncation.of(tokenizer), checked_budget(tokenizer, max_length)
    tally = Counter[str]() if counters is None else counters
    return _Truncated(cut, max_length, budget, tally, prompt).windows(documents)


def _inside(text: str, position: int) -> bool:
    """Return whether a character position is inside a word of the text."""
    spans = maskable_spans(text) if position else np.empty((0, 2))
    return bool(((spans[:, 0] < position) & (position < spans[:, 1])).any())


def iter_pairs(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    separator: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield one window of at most `max_length` tokens for each document. `separator` divides the
    two texts of a document.

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
    tally = Counter[str]() if counters is None else counters
    cut = Truncation.of(tokenizer)
    fit = _Truncated(cut, max_length, max_length - specials, tally, separator=separator)
    return fit.windows(documents)


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


def iter_parallel(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    prompt: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield one window for the second text of each document. The window's `read` has the token ids
    of the first text. Each text has at most `max_length` tokens, and `prompt` is put before each.

    `counters` is filled as in `iter_windows`, but `no_tokens` counts texts. Raises UserError like
    `iter_windows`, and for an empty text.
    """
    for batch in document_batches(whole_pairs(documents, SEPARATOR, "one text alone is of no use")):
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
    """Yield (number, hash) of each document, as in `store.tools.document_hashes`.

    With `gold` the hash covers the label ids, too.
    """
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
