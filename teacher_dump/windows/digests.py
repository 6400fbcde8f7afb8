"""Hashes documents by the windows that are cut of them, as a store hashes those that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from teachonce.store.tools.documents import document_digests, sequence_digest
from teachonce.teacher_dump.windows.window import Window


def window_digests(windows: Iterable[Window], gold: bool = True) -> Iterator[tuple[int, bytes]]:
    """Yield (number, hash) of the documents of windows, see `store.tools.documents`; with `gold`
    the hash is also of the numbers of their labels."""
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
