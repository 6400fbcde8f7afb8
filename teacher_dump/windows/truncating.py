"""Truncates texts with one label or vector each, to the tokens of transformers' `truncation=True`.

The text of a sequence, tokenized alone, must give its stored tokens. So a text is cut where a token
ends, if need be inside a word. If a token covers only part of a character, the cut is before this
character, and the text has a few tokens fewer than in transformers. With `truncation_side` left,
most tokenizers tokenize the rest of a word differently than in the whole word: the text then begins
at the next word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import (
    SEGMENT,
    checked_budget,
    document_batches,
    encoder,
    fast_backend,
)
from teachonce.teacher_dump.windows.masked_views import word_spans
from teachonce.teacher_dump.windows.window import Window, make_window, storable

TRIES = 16  # cuts that are tried before one whose tokens differ from transformers' is accepted
SPARE = 64  # tokens after a cut that a tokenized stretch of a long text must have


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
        """Create it from a transformers tokenizer. Raises UserError for a slow one."""
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
                place = int(end[len(ids) - count - 1])
                span, expected = (place, len(text)), ids[len(ids) - count :]
            else:
                # Tokens that are parts of one character all have its span.
                place = int(min(end[count - 1], begin[count]))
                span, expected = (0, place), ids[:count]
            stretch = text[span[0] : span[1]]
            if not stretch[prompt:].strip():
                break
            found = self._ordinary(self.encode([stretch])[0])[0]
            size = min(len(found), count)
            if np.array_equal(found, expected[-size:] if self.left else expected[:size]):
                return span
            fitting = fitting or (span if 0 < len(found) <= budget else None)
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

    def _tokens(self, text: str, budget: int, whole: Any) -> tuple[Array, Array, Array]:
        """Return ids, begins and ends of tokens, starting from the side of the text that is not cut
        off."""
        reach = SEGMENT
        while True:
            stretch = text[-reach:] if self.left else text[:reach]
            found = self._ordinary(whole or self.encode([stretch])[0])
            if whole or len(stretch) == len(text) or len(found[0]) > budget + SPARE:
                break
            reach *= 4
        ids, offsets = found
        offsets += len(text) - len(stretch) if self.left and not whole else 0
        # A normalizer may swap characters: make the spans ascend.
        begin, end = np.maximum.accumulate(offsets, axis=0).T
        return ids, begin, end

    @staticmethod
    def _ordinary(encoding: Any) -> tuple[Array, Array]:
        ordinary = ~np.array(encoding.special_tokens_mask, bool)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int64)[ordinary], offsets[ordinary]


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
    for batch in document_batches(documents):
        texts = [storable(prompt + document.text, tally) for document in batch]
        # Of a longer text only as much is tokenized as its cut needs (`_tokens`).
        short = [i for i, text in enumerate(texts) if len(text) <= SEGMENT]
        encodings = dict(zip(short, cut.encode([texts[i] for i in short]), strict=True))
        for i, document in enumerate(batch):
            text, encoding, begin, end = texts[i], encodings.pop(i, None), 0, len(texts[i])
            if encoding is None or len(encoding) > max_length:
                begin, end = cut.checked_span(text, budget, encoding, document, prompt)
                encoding = cut.encode([text[begin:end]])[0]
            window = replace(
                make_window(
                    text[begin:end], document.number, begin, _inside(text, begin), encoding
                ),
                lost=len(text) - (end - begin),
                gold=document.gold,
            )
            if window.special.all():
                tally["no_tokens"] += 1
            else:
                yield window


def _inside(text: str, place: int) -> bool:
    """Return whether a character position is inside a word of the text."""
    words = word_spans(text) if place else np.empty((0, 2))
    return bool(((words[:, 0] < place) & (place < words[:, 1])).any())
