"""Tokenizes texts whose words are known: the tokens of each word, and windows of long texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Spans = Sequence[tuple[int, int]]
"""The (begin, end) of words in a text, ascending."""
WORD_COLUMNS = ("tokens", "words")
"""Default names of a column of lists of words."""
OVERLAP = 3
"""Neighbouring windows share a third of their tokens, as in the task qa."""


@dataclass(frozen=True, slots=True)
class WordWindow:
    """Describes a window of a text: the token ids `ids`, and the words that they spell.

    words: the numbers of its words.
    own: the words whose tags are taken from this window; the other words have more context in an
        adjacent window.
    pieces: for each of `words`, the positions of its tokens in `ids`.
    cut: whether the window has one word, which is truncated because it has too many tokens.
    """

    words: range
    own: range
    ids: list[int]
    pieces: list[range]
    cut: bool = False

    def own_pieces(self) -> Iterator[tuple[int, range]]:
        """Yield the number of each of the `own` words, with the positions of its tokens."""
        pieces = zip(self.words, self.pieces, strict=True)
        return ((word, run) for word, run in pieces if word in self.own)


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words by spaces; return the text and the span of each word."""
    spans, begin = [], 0
    for word in words:
        spans.append((begin, begin + len(word)))
        begin += len(word) + 1
    return " ".join(words), spans


def word_windows(tokenizer: Any, text: str, spans: Spans, limit: int) -> Iterator[WordWindow]:
    """Yield the windows of a text, at most `limit` tokens each; one window if all of it fits.

    A word with more tokens is truncated.
    """
    ids, pieces = word_pieces(tokenizer, text, spans, None)
    if len(ids) <= limit:
        yield WordWindow(range(len(spans)), range(len(spans)), ids, pieces)
        return

    def encoded(begin: int, end: int, limit: int | None) -> tuple[list[int], list[range]]:
        start, stop = spans[begin][0], spans[end - 1][1]
        inside = [(first - start, last - start) for first, last in spans[begin:end]]
        return word_pieces(tokenizer, text[start:stop], inside, limit)

    room = max(1, limit - tokenizer.num_special_tokens_to_add(pair=False))
    sizes, begin, first = [len(run) for run in pieces], 0, 0
    while begin < len(spans):
        end = _stop(sizes, begin, room)
        window = encoded(begin, end, None)
        # A word may have other tokens at the start of a window than inside the text.
        while len(window[0]) > limit and end - begin > 1:
            end -= 1
            window = encoded(begin, end, None)
        if cut := len(window[0]) > limit:
            window = encoded(begin, end, limit)
        following = end
        # `following` stays above `begin`, so that every window starts later than the one before it.
        while following - 1 > begin and sum(sizes[following - 1 : end]) <= room // OVERLAP:
            following -= 1
        # Each window tags the half of the overlap that is farther from its own edge.
        last = end if end == len(spans) else (following + end + 1) // 2
        yield WordWindow(range(begin, end), range(first, last), *window, cut)
        begin, first = (end, end) if end == len(spans) else (following, last)


def _stop(sizes: Sequence[int], begin: int, room: int) -> int:
    """Return the end of the longest run of words from `begin` that fits, at least one word."""
    end, used = begin + 1, sizes[begin]
    while end < len(sizes) and used + sizes[end] <= room:
        used += sizes[end]
        end += 1
    return end


def run_starts(pieces: Sequence[range]) -> list[int]:
    """Return the start of each range of tokens, -1 for an empty range."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, text: str, spans: Spans, max_length: int | None
) -> tuple[list[int], list[range]]:
    """Return the token ids of a text, and the positions of each word's pieces.

    max_length: truncates the text to this number of tokens; words after it have no pieces. None for
        no limit.
    """
    # By offsets and not by `is_split_into_words`: with it, byte-level tokenizers tokenize a word as
    # if no space preceded it.
    encoded = tokenizer(
        text,
        truncation=max_length is not None,
        max_length=max_length,
        verbose=False,  # a warning about long texts would be wrong: windows follow
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
    )
    offsets, special = encoded["offset_mapping"], encoded["special_tokens_mask"]
    pieces, position = [], 0
    for begin, end in spans:
        while position < len(offsets) and (special[position] or offsets[position][1] <= begin):
            position += 1
        stop = position
        while stop < len(offsets) and not special[stop] and offsets[stop][0] < end:
            stop += 1
        pieces.append(range(position, stop))
    return encoded["input_ids"], pieces
