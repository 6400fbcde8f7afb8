"""Makes a window of each pair of texts: both texts as the teacher reads them at once.

A pair that is too long is cut, never divided into windows: its label is that of the whole pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from teachonce.store.format.pairs import divided, has_pair_form
from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import (
    SEGMENT,
    Cutter,
    Encode,
    document_batches,
    encoder,
    fast_backend,
)
from teachonce.teacher_dump.windows.window import Window, make_window, storable


def iter_pairs(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    separator: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield a window of at most `max_length` tokens for each document, a pair that `separator`
    divides.

    Of a longer pair the longer text is cut first, until both have as many tokens (`longest_first`
    of tokenizers), each between words as `iter_windows` cuts. `counters` is filled as by that.
    Raises UserError for a slow tokenizer, for one that puts nothing between two texts, for an
    impossible `max_length`, and for a character that alone gives more tokens than fit.
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
            f"({specials} special tokens and one of each text)"
        )
    fit = _Fitting(encoder(backend), max_length, specials, separator)
    tally = Counter[str]() if counters is None else counters
    for batch in document_batches(documents):
        for window in fit.windows(batch, tally):
            if window.special.all():
                tally["no_tokens"] += 1
            else:
                yield window


def whole_pairs(documents: Iterable[Document], separator: str, why: str) -> Iterator[Document]:
    """Yield the documents; raise UserError at a pair of which one text is empty, and say `why` both
    are needed."""
    for document in documents:
        for text, side in zip(
            divided(document.text, separator, document.source), ("first", "second"), strict=True
        ):
            if not text or text.isspace():
                raise UserError(
                    f"{document.source}: the {side} text of pair {document.number + 1} is empty"
                    f" ({document.text.replace(separator, ' | ')!r:.60}), and {why};"
                    " fill it in, or take the row out"
                )
        yield document


class _Fitting:
    """Makes pairs fit into `max_length` tokens, of which `specials` are special ones."""

    def __init__(self, encode: Encode, max_length: int, specials: int, separator: str) -> None:
        self._encode, self._max_length = encode, max_length
        self._budget, self._separator = max_length - specials, separator

    def windows(self, documents: list[Document], counters: Counter[str]) -> Iterator[Window]:
        texts = [storable(document.text, counters) for document in documents]
        pairs = [
            divided(t, self._separator, d.source) for t, d in zip(texts, documents, strict=True)
        ]
        short = [i for i, pair in enumerate(pairs) if max(map(len, pair)) <= SEGMENT]
        encodings = dict(zip(short, self._encode([pairs[i] for i in short]), strict=True))
        for i, document in enumerate(documents):
            if i not in encodings or len(encodings[i]) > self._max_length:
                pair = self._cut(pairs[i], document.number)
                texts[i], encodings[i] = self._separator.join(pair), self._encode([pair])[0]
                counters["cut"] += 1
            window = make_window(
                texts[i], document.number, 0, False, encodings.pop(i), self._separator
            )
            yield replace(window, gold=document.gold)

    def _cut(self, pair: tuple[str, ...], number: int) -> tuple[str, ...]:
        """Cut a pair's texts to as many tokens as fit, the longer one first."""
        heads = self._encode([text[:SEGMENT] for text in pair])
        counts = [len(head) - sum(head.special_tokens_mask) for head in heads]
        shorter = min(min(counts), self._budget // 2)
        longer = self._budget - shorter
        first_is_longer = counts[0] > counts[1]
        budgets = (longer, shorter) if first_is_longer else (shorter, longer)
        each = zip(pair, heads, budgets, strict=True)
        return tuple(self._beginning(text, head, budget, number) for text, head, budget in each)

    def _beginning(self, text: str, head: Any, budget: int, number: int) -> str:
        """Return the longest beginning of a text that has at most `budget` tokens."""
        specials = sum(head.special_tokens_mask)
        whole = head if len(text) <= SEGMENT else None
        if whole is not None and len(whole) - specials <= budget:
            return text
        sizes = budget + specials, budget, 0
        cutter = Cutter(text, number, whole, self._encode, sizes, first_only=True)
        while not cutter.done:
            plan = cutter.plan()
            cutter.keep(plan, self._encode([text[begin:end] for begin, end, _ in plan]))
        return cutter.kept[0].text
