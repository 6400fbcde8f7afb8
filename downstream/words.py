"""Word/tag files, and which piece of a tokenization is the first of each word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store.errors import UserError


@dataclass(frozen=True)
class Sentence:
    """Words and their tags, equally many and at least one, and the line of `file` that the first
    stands in."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str = field(default="", compare=False)
    line: int = field(default=1, compare=False)

    def where(self, number: int) -> str:
        """The place of a word, for errors."""
        return f"tags {self.file}, line {self.line + number}"


def read_tagged(path: Path) -> list[Sentence]:
    """Read `word<TAB>tag` lines with a blank line between sentences.

    Raises UserError with the line's number on any other line, and where the file is missing, empty
    or not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"tags {path}: not UTF-8 ({error.reason}); convert it, e.g. with iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"tags {path}: cannot be read: {error.strerror}; check the path") from None
    sentences, pairs = [], []
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            word, tab, tag = line.rstrip("\r").partition("\t")
            if not (word.strip() and tab and tag.strip()) or "\t" in tag:
                raise UserError(
                    f"tags {path}, line {number}: expected word<TAB>tag, got {line[:60]!r}; "
                    "separate sentences by a blank line"
                )
            pairs.append((word, tag.strip()))
        elif pairs:
            words, tags = zip(*pairs, strict=True)
            sentences.append(Sentence(words, tags, str(path), number - len(pairs)))
            pairs = []
    if not sentences:
        raise UserError(f"tags {path}: has no sentence; give word<TAB>tag lines")
    return sentences


def first_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int
) -> tuple[list[int], list[int]]:
    """Token ids of the words joined by blanks, and where each word's first piece is, or -1."""
    ids, pieces = word_pieces(tokenizer, words, max_length)
    return ids, starts(pieces)


def starts(pieces: Sequence[range]) -> list[int]:
    """Where each run begins, -1 for an empty one."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int
) -> tuple[list[int], list[range]]:
    """Token ids of the words joined by blanks, and where each word's pieces are (nowhere: empty).

    Positions come from character offsets, not from `is_split_into_words`, because byte-level
    tokenizers treat words given apart as if no blank preceded them.
    """
    encoded = tokenizer(
        " ".join(words),
        truncation=True,
        max_length=max_length,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    spans, special = encoded["offset_mapping"], encoded["special_tokens_mask"]
    pieces, position, begin = [], 0, 0
    for word in words:
        end = begin + len(word)
        while position < len(spans) and (special[position] or spans[position][1] <= begin):
            position += 1
        stop = position
        while stop < len(spans) and not special[stop] and spans[stop][0] < end:
            stop += 1
        pieces.append(range(position, stop))
        begin = end + 1
    return encoded["input_ids"], pieces
