"""The windows of one text."""

from typing import Any

from teachonce.teacher_dump.corpus.documents import Document
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.window import Window


def cut_windows(text: str, tokenizer: Any, max_length: int, stride: int = 0) -> list[Window]:
    return list(iter_windows([Document(text, "", 0)], tokenizer, max_length, stride))
