"""Turns the windows of one part into bytes and back, for another process to run the teacher over.

The bytes are a .npz archive: arrays that need no pickle, each with a checksum.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

import numpy as np

from teachonce.support.arrays import Array, starts
from teachonce.teacher_dump.windows.window import Window

ABSENT = -1  # the length of an array that a window does not have
OPTIONAL = ("numbers", "types", "read")


class Unreadable(ValueError):
    """Bytes that are not what `packed` made: torn by a disk, or of another release."""


def packed(first_sequence: int, windows: Sequence[Window]) -> bytes:
    """Pack windows, without the words of their gold labels, whose numbers they hold.

    `first_sequence` is the number of the first of them in the store. Equal windows give equal
    bytes.
    """
    texts = [w.text.encode() for w in windows]
    arrays = {
        "first_sequence": np.array(first_sequence),
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "text_lengths": np.array([len(text) for text in texts], np.int64),
        "document": np.array([w.document for w in windows], np.int64),
        "document_begin": np.array([w.document_begin for w in windows], np.int64),
        "hard_cut": np.array([w.hard_cut for w in windows], bool),
        "lengths": np.array([len(w.ids) for w in windows], np.int64),
        "ids": np.concatenate([w.ids for w in windows]),
        "offsets": np.concatenate([w.offsets for w in windows]),
        "special": np.concatenate([w.special for w in windows]),
    }
    for name in OPTIONAL:
        found: list[Array | None] = [getattr(w, name) for w in windows]
        sizes = [ABSENT if array is None else len(array) for array in found]
        arrays[f"{name}_lengths"] = np.array(sizes, np.int64)
        there = [array for array in found if array is not None]
        arrays[name] = np.concatenate(there) if there else np.empty(0, np.int32)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def unpacked(data: bytes) -> tuple[int, list[Window]]:
    """Return the number of the first sequence and the windows. Raises Unreadable."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return _windows({name: archive[name] for name in archive.files})
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise Unreadable(str(error)) from error


def is_whole(data: bytes) -> bool:
    """Tell whether `unpacked` can read these bytes."""
    try:
        unpacked(data)
    except Unreadable:
        return False
    return True


def _windows(arrays: dict[str, Array]) -> tuple[int, list[Window]]:
    tokens = np.cumsum(arrays["lengths"])[:-1]
    ids, offsets, special = (np.split(arrays[n], tokens) for n in ("ids", "offsets", "special"))
    text, ends = arrays["text"].tobytes(), starts(arrays["text_lengths"])
    numbers, types, read = (_optional(arrays, name) for name in OPTIONAL)
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
