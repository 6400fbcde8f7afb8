"""Reads sentences of tagged words, and finds the pieces of each word in a tokenization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError
from teachonce.teacher_dump.corpus.files import tagged_sentences


@dataclass(frozen=True)
class Sentence:
    """Words and their tags, equally many and at least one; `lines` of `file` hold them."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    file: str = field(default="", compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)

    def where(self, number: int) -> str:
        """Tell where the word of this number stands, for errors."""
        line = self.lines[number] if self.lines else number + 1
        return f"tags {self.file}, line {line}"


def read_tagged(path: Path) -> list[Sentence]:
    """Read `word<TAB>tag` lines with a blank line between sentences, as teacher-dump does.

    Raises UserError with the line's number for any other line, and for a word without a tag, which
    teacher-dump takes; also where the file is missing, empty or not UTF-8.
    """
    sentences = []
    try:
        for sentence in tagged_sentences(path):
            for line, word, tag in sentence:
                if not word.strip() or not tag:
                    raise UserError(
                        f"tags {path}, line {line}: expected word<TAB>tag, got {word[:60]!r} with "
                        f"tag {tag!r}; mend the line or take it out"
                    )
            lines, words, tags = zip(*sentence, strict=True)
            sentences.append(Sentence(words, tags, str(path), lines))
    except OSError as error:
        raise UserError(f"tags {path}: cannot be read: {error.strerror}; check the path") from None
    every = [word for sentence in sentences for word in sentence.words]
    texts = sum(" " in word for word in every)
    if texts > len(every) / 2:
        raise UserError(
            f"tags {path}: {texts} of {len(every)} words have blanks in them, as whole texts have;"
            " give word<TAB>tag lines with a blank line between sentences, or for texts with labels"
            " --task classify"
        )
    if not sentences:
        raise UserError(f"tags {path}: has no sentence; give word<TAB>tag lines")
    return sentences


def first_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int
) -> tuple[list[int], list[int]]:
    """Return token ids of the words joined by blanks, and the position of each word's first piece.

    A word without a piece has position -1.
    """
    ids, pieces = word_pieces(tokenizer, words, max_length)
    return ids, first_of(pieces)


def first_of(pieces: Sequence[range]) -> list[int]:
    """Return where each run begins, -1 for an empty one."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int
) -> tuple[list[int], list[range]]:
    """Return token ids of the words joined by blanks, and the positions of each word's pieces.

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
