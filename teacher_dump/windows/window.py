"""Windows (sequences of a store with their tokens), their batches, and their form as bytes."""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.store.format.sequences import offsets_of
from teachonce.support.arrays import Array, starts
from teachonce.teacher_dump.corpus.labelled_text import Gold

ABSENT = -1  # written as the length of an array that a window does not have
OPTIONAL = ("numbers", "types", "read", "learn", "messages")


# Without `eq`: NumPy compares arrays element by element, which gives no truth value.
@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Holds one sequence of the store: a part of a document and its T tokens.

    document_begin: position in the document of the first character.
    hard_cut: whether this position is inside a word.
    offsets: half-open spans of characters of `text`; (0, 0) for special tokens.
    gold: the document's gold label or tags.
    numbers: int32, the gold label [1] or the tags of the tokens [T] as label ids; -1: not labelled.
    types: token_type_ids of a pair of texts.
    read: the teacher's input ids, if the teacher reads another text than the student.
    lost: the number of characters that truncation cut off; `packed` does not store it.
    context: the number of first tokens that the previous window has as well.
    learn: bool [T], the tokens that students are trained on; None for all.
    messages: int32 [M, 3], begin, end and role of the contents of a chat, as `Sequences` has them.
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
    lost: int = 0
    context: int = 0
    learn: Array | None = None
    messages: Array | None = None


def count_tokens(windows: Iterable[Window]) -> int:
    """Count the tokens of windows."""
    return sum(len(window.ids) for window in windows)


def make_window(
    text: str,
    document: int,
    begin: int,
    hard_cut: bool,
    encoding: Any,
    separator: str | None = None,
) -> Window:
    """Create the window of a text, or of a pair of texts, from its `tokenizers.Encoding`."""
    special = np.array(encoding.special_tokens_mask, bool)
    offsets = offsets_of(encoding, text, separator)
    ids = np.array(encoding.ids, np.int32)
    types = None if separator is None else np.array(encoding.type_ids, np.int32)
    return Window(text, document, begin, hard_cut, ids, offsets, special, types=types)


def storable(text: str, counters: Counter[str]) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD; count them as `surrogates`."""
    if text.isascii():
        return text
    clean, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text)
    counters["surrogates"] += replaced
    return clean


def length_batches(lengths: Sequence[int] | Array, batch_tokens: int) -> list[Array]:
    """Group row numbers into batches with rows x longest row <= batch_tokens, longest rows first.

    A row longer than `batch_tokens` is a batch of its own.
    """
    # Longest first: a batch that does not fit into memory fails at once, not after hours.
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[Array] = []
    begin = 0
    while begin < len(order):
        count = max(1, batch_tokens // int(lengths[order[begin]]))
        batches.append(order[begin : begin + count])
        begin += count
    return batches


def padded(rows: Sequence[Array | list[int]], padding: int) -> tuple[Array, Array]:
    """Pad rows to one length: return token ids int64 [B,L], and bool [B,L], true for tokens."""
    lengths = np.array([len(row) for row in rows])
    present = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(present.shape, padding, np.int64)
    ids[present] = np.concatenate(rows)
    return ids, present


class Unreadable(ValueError):
    """Raised for bytes that `packed` did not write: damaged, or written by another release."""


def packed(first_sequence: int, windows: Sequence[Window]) -> bytes:
    """Serialize windows for another process as a .npz archive without pickle.

    Gold labels are stored as label ids only. `first_sequence` is the number of the first window in
    the store. Equal windows give equal bytes. The archive has a checksum for each array.
    """
    texts = [w.text.encode() for w in windows]
    arrays = {
        "first_sequence": np.array(first_sequence),
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "text_lengths": np.array([len(text) for text in texts], np.int64),
        "document": np.array([w.document for w in windows], np.int64),
        "document_begin": np.array([w.document_begin for w in windows], np.int64),
        "hard_cut": np.array([w.hard_cut for w in windows], bool),
        "context": np.array([w.context for w in windows], np.int64),
        "lengths": np.array([len(w.ids) for w in windows], np.int64),
        "ids": np.concatenate([w.ids for w in windows]),
        "offsets": np.concatenate([w.offsets for w in windows]),
        "special": np.concatenate([w.special for w in windows]),
    }
    for name in OPTIONAL:
        values: list[Array | None] = [getattr(w, name) for w in windows]
        sizes = [ABSENT if array is None else len(array) for array in values]
        arrays[f"{name}_lengths"] = np.array(sizes, np.int64)
        present = [array for array in values if array is not None]
        arrays[name] = np.concatenate(present) if present else np.empty(0, np.int32)
    file = io.BytesIO()
    # `savez` dates its members 1980, so that a queue can compare the bytes of two runs.
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpacked(data: bytes) -> tuple[int, list[Window]]:
    """Return the number of the first sequence, and the windows. Raises Unreadable."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return _windows({name: archive[name] for name in archive.files})
    # RuntimeError: a damaged header requires a password, or an unknown kind of compression.
    except (ValueError, KeyError, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise Unreadable(str(error)) from error


def is_whole(data: bytes) -> bool:
    """Return whether `unpacked` can read these bytes."""
    try:
        unpacked(data)
    except Unreadable:
        return False
    return True


def _windows(arrays: dict[str, Array]) -> tuple[int, list[Window]]:
    tokens = np.cumsum(arrays["lengths"])[:-1]
    ids, offsets, special = (np.split(arrays[n], tokens) for n in ("ids", "offsets", "special"))
    text, ends = arrays["text"].tobytes(), starts(arrays["text_lengths"])
    numbers, types, read, learn, messages = (_optional(arrays, name) for name in OPTIONAL)
    windows = [
        Window(
            text[ends[i] : ends[i + 1]].decode(),
            int(arrays["document"][i]),
            int(arrays["document_begin"][i]),
            bool(arrays["hard_cut"][i]),
            ids[i],
            offsets[i],
            special[i],
            numbers=numbers[i],
            types=types[i],
            read=read[i],
            context=int(arrays["context"][i]),
            learn=learn[i],
            messages=messages[i],
        )
        for i in range(len(arrays["lengths"]))
    ]
    return int(arrays["first_sequence"]), windows


def _optional(arrays: dict[str, Array], name: str) -> list[Array | None]:
    sizes = arrays[f"{name}_lengths"]
    ends = starts(np.maximum(sizes, 0))
    values = arrays[name]
    return [
        None if size == ABSENT else values[ends[i] : ends[i + 1]] for i, size in enumerate(sizes)
    ]
