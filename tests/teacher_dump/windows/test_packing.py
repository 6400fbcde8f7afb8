"""Windows of a part are passed to another process as bytes, and come back unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from teachonce.store.format.sequences import SEPARATOR
from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.sequences import iter_pairs, iter_parallel
from teachonce.teacher_dump.windows.window import Unreadable, Window, is_whole, packed, unpacked
from tests.making.models import Tokenizers
from tests.making.texts import ENGLISH, RUSSIAN


def documents(*texts: str) -> list[Document]:
    return [Document(text, "here", number) for number, text in enumerate(texts)]


def check(windows: list[Window]) -> None:
    data = packed(7, windows)
    assert data == packed(7, windows)
    first, found = unpacked(data)
    assert first == 7 and len(found) == len(windows)
    for one, other in zip(windows, found, strict=True):
        for name in ("text", "document", "document_begin", "hard_cut"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("ids", "offsets", "special", "numbers", "types", "read"):
            before, after = getattr(one, name), getattr(other, name)
            assert (before is None) == (after is None)
            if before is not None:
                assert before.dtype == after.dtype and np.array_equal(before, after)


def test_windows_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [" ".join(ENGLISH[:20]), "a\U0001f600\u00e9 " + RUSSIAN[0], "x"]
    check(list(iter_windows(documents(*texts), make_tokenizer("wordpiece"), 16)))


def test_windows_of_pairs_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [SEPARATOR.join(ENGLISH[i : i + 2]) for i in range(3)]
    pairs = iter_pairs(documents(*texts), make_tokenizer("wordpiece"), 32, SEPARATOR)
    check(list(pairs))


def test_windows_of_parallel_texts_come_back(make_tokenizer: Tokenizers) -> None:
    texts = [SEPARATOR.join(pair) for pair in zip(ENGLISH, RUSSIAN[:3], strict=False)]
    windows = list(iter_parallel(documents(*texts), make_tokenizer("wordpiece"), 32, "find: "))
    assert len(windows) == 3 and all(window.read is not None for window in windows)
    check(windows)


def test_torn_bytes_are_found(make_tokenizer: Tokenizers) -> None:
    data = packed(0, list(iter_windows(documents(*ENGLISH[:5]), make_tokenizer("wordpiece"), 32)))
    assert is_whole(data)
    listed = data.rindex(b"PK\x01\x02")  # for the last member: flags at 8, compression at 10
    flipped = [bytearray(data) for _ in range(3)]
    for each, place in zip(flipped, (len(data) // 2, listed + 8, listed + 10), strict=True):
        each[place] ^= 1
    for bad in (b"", data[:100], data[:-30], *map(bytes, flipped)):
        assert not is_whole(bad)
        with pytest.raises(Unreadable):
            unpacked(bad)
