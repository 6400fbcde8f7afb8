"""Documents cut into windows: what the teacher sees at once, with its tokens and their offsets.

A window is cut between words, so that its text, tokenised alone, gives its tokens. Every document
is tokenised once; one that is too long is cut where the offsets say, and each of its windows is
tokenised alone.

Characters that UTF-8 cannot hold (lone surrogates, which JSON escapes can make) become U+FFFD. A
window without any token (blanks, control characters) is left out. Both are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from support.errors import UserError
from teacher_dump.corpus.documents import Document
from teacher_dump.windows.cutting import SEGMENT, Cutter, Encode, Sizes, Window, make_window

__all__ = ["SEGMENT", "Window", "iter_windows"]

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 1_000_000  # a batch ends with whichever comes first


def iter_windows(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    stride: int = 0,
    counters: Counter[str] | None = None,
    one_each: bool = False,
) -> Iterator[Window]:
    """The windows of all documents, in order, each of at most `max_length` tokens in all.

    `tokenizer` is a fast tokenizer of transformers. With stride 0 the windows' texts joined give
    the document. With stride N a window begins at the first word after which at most N tokens of
    the document are left to the end of the window before it. Cuts are made before blanks and CJK
    characters, else between words (`masking.word_spans`); a word longer than a window is cut
    inside, but not between a letter and its marks. `one_each` keeps the first window of each
    document only, for one label of it all.

    `counters` is filled on the way: `no_tokens` (windows left out), `surrogates` (characters
    replaced), `cut` (documents of which the first window is not all). Raises UserError for a slow
    tokenizer, for a `max_length` or a `stride` that cannot be, and for a character that alone gives
    more tokens than a window holds.
    """
    if not getattr(tokenizer, "is_fast", False):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"tokenizer {name}: a slow one, without the offsets by which the store keys "
            f"every token; a fast tokenizer (tokenizer.json) is needed"
        )
    backend = tokenizer.backend_tokenizer
    specials = backend.num_special_tokens_to_add(is_pair=False)
    if max_length < specials + 2:
        raise UserError(
            f"--max-length {max_length}: expected at least {specials + 2} "
            f"({specials} special tokens and 2 of text)"
        )
    if not 0 <= stride < max_length - specials:
        raise UserError(
            f"--stride {stride}: expected 0 to {max_length - specials - 1} "
            f"(--max-length {max_length} less {specials} special tokens less 1)"
        )

    def encode(texts: list[str]) -> list[Any]:
        # transformers leaves the truncation and padding of its last call behind
        backend.no_truncation()
        backend.no_padding()
        return list(backend.encode_batch(texts))

    tally = Counter[str]() if counters is None else counters
    sizes = max_length, max_length - specials, stride
    return (
        window
        for batch in _batches(documents)
        for window in _cut_batch(batch, encode, sizes, tally, one_each)
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _cut_batch(
    documents: list[Document],
    encode: Encode,
    sizes: Sizes,
    counters: Counter[str],
    one_each: bool,
) -> Iterator[Window]:
    texts = [storable(document.text, counters) for document in documents]
    whole = [i for i, text in enumerate(texts) if len(text) <= SEGMENT]
    encodings = dict(zip(whole, encode([texts[i] for i in whole]), strict=True))
    long = {
        i: Cutter(text, documents[i].number, encodings.get(i), encode, sizes, one_each)
        for i, text in enumerate(texts)
        if i not in encodings or len(encodings[i]) > sizes[0]
    }
    active = list(long.values())
    while active:
        plans = [cutter.plan() for cutter in active]
        proposed = list(zip(active, plans, strict=True))
        tried = iter(encode([cutter.text[b:e] for cutter, plan in proposed for b, e, _ in plan]))
        for cutter, plan in proposed:
            cutter.keep(plan, [next(tried) for _ in plan])
        active = [cutter for cutter in active if not cutter.done]
    for i, document in enumerate(documents):
        if i in long:
            windows = long[i].kept
            counters["cut"] += long[i].cut
        else:
            windows = [make_window(texts[i], document.number, 0, False, encodings[i])]
        for window in windows:
            if window.special.all():
                counters["no_tokens"] += 1
            else:
                yield replace(window, gold=document.gold) if document.gold else window


def storable(text: str, counters: Counter[str]) -> str:
    """The text with U+FFFD for characters that UTF-8 cannot hold, which are counted."""
    if text.isascii():
        return text
    clean, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text)
    counters["surrogates"] += replaced
    return clean
