"""Makes a window of each two parallel texts, such as a sentence and its translation: the student's
text as it is stored, and the tokens of the other, which the teacher reads.

A text that is too long is cut, never divided into windows: the vector is of the whole text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from teachonce.store.format.pairs import SEPARATOR, divided
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import document_batches, iter_windows, prompted
from teachonce.teacher_dump.windows.pairs import whole_pairs
from teachonce.teacher_dump.windows.window import Window


def iter_parallel(
    documents: Iterable[Document],
    tokenizer: Any,
    max_length: int,
    prompt: str,
    counters: Counter[str] | None = None,
) -> Iterator[Window]:
    """Yield a window of at most `max_length` tokens for the second text of each document, with the
    tokens of the first, at most as many, as `Window.read`; `prompt` stands before both.

    `counters` is filled as by `iter_windows`, where `cut` and `no_tokens` count texts. Raises
    UserError as `iter_windows` does, and at an empty text.
    """
    for batch in document_batches(whole_pairs(documents, SEPARATOR, "each is of no use alone")):
        first, second = (
            iter_windows(
                *(prompted(_sides(batch, side), prompt), tokenizer, max_length),
                counters=counters,
                one_each=True,
            )
            for side in (0, 1)
        )
        read = {window.document: window.ids for window in first}
        yield from (replace(w, read=read[w.document]) for w in second if w.document in read)


def _sides(documents: list[Document], side: int) -> Iterator[Document]:
    for document in documents:
        yield replace(document, text=divided(document.text, SEPARATOR, document.source)[side])
