"""Holds a window: one sequence of the store with its tokens, offsets and gold label or tags."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.store.format.pairs import offsets_of
from teachonce.support.arrays import Array
from teachonce.teacher_dump.corpus.labelled_text import Gold


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One sequence of the store: a stretch of a document and its T tokens.

    `document_begin` is the character where it begins in its document; `hard_cut` is true where that
    is inside a word. `offsets` are half-open spans of characters of `text`; special tokens have
    (0, 0). `gold` holds the document's gold label or tags. `numbers` int32 holds them as numbers of
    the teacher's labels: the label [1] or the tags of the tokens [T], -1 where there is none.
    `types` tells of a pair of texts which one each token is of, as the tokenizer tells it. `read`
    are the ids that the teacher reads, where these are of another text.
    """

    text: str
    document: int
    document_begin: int
    hard_cut: bool
    ids: Array  # int32[T]
    offsets: Array  # int32[T, 2]
    special: Array  # bool[T]
    gold: Gold | None = None
    numbers: Array | None = None
    types: Array | None = None  # int32[T]
    read: Array | None = None  # int32

    @property
    def teacher_ids(self) -> Array:
        """The ids that the teacher reads, in view 0."""
        return self.ids if self.read is None else self.read


def make_window(
    text: str,
    document: int,
    begin: int,
    hard_cut: bool,
    encoding: Any,
    separator: str | None = None,
) -> Window:
    """Make the window of a text, or of a pair of texts, from its encoding by `tokenizers`."""
    special = np.array(encoding.special_tokens_mask, bool)
    offsets = offsets_of(encoding, text, separator)
    ids = np.array(encoding.ids, np.int32)
    types = None if separator is None else np.array(encoding.type_ids, np.int32)
    return Window(text, document, begin, hard_cut, ids, offsets, special, types=types)


def storable(text: str, counters: Counter[str]) -> str:
    """Replace characters that UTF-8 cannot hold by U+FFFD, and count them as `surrogates`."""
    if text.isascii():
        return text
    clean, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text)
    counters["surrogates"] += replaced
    return clean
