"""Tokenizes sentences of words: the tokens of each word, and windows of long sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OVERLAP = 3
"""Neighbouring windows share a third of their tokens, as in the task qa."""


@dataclass(frozen=True, slots=True)
class WordWindow:
    """A window of a sentence.

    words: the numbers of its words.
    own: the words whose tags are taken from this window; the other words have more context in a
    neighbouring window.
    pieces: for each of `words`, the positions of its tokens in `ids`.
    """

    words: range
    own: range
    ids: list[int]
    pieces: list[range]


def word_windows(tokenizer: Any, words: Sequence[str], limit: int) -> Iterator[WordWindow]:
    """Yield the windows of a sentence, at most `limit` tokens each; one window if all of it fits.

    A word with more tokens is truncated.
    """
    ids, pieces = word_pieces(tokenizer, words, None)
    if len(ids) <= limit:
        yield WordWindow(range(len(words)), range(len(words)), ids, pieces)
        return
    room = max(1, limit - tokenizer.num_special_tokens_to_add(pair=False))
    sizes, begin, first = [len(run) for run in pieces], 0, 0
    while begin < len(words):
        end = _stop(sizes, begin, room)
        # A word may have other tokens at the start of a window than inside the sentence.
        while end - begin > 1 and len(word_pieces(tokenizer, words[begin:end], None)[0]) > limit:
            end -= 1
        following = end
        while following - 1 > begin and sum(sizes[following - 1 : end]) <= room // OVERLAP:
            following -= 1
        last = end if end == len(words) else (following + end + 1) // 2
        yield WordWindow(
            range(begin, end),
            range(first, last),
            *word_pieces(tokenizer, words[begin:end], limit),
        )
        begin, first = (end, end) if end == len(words) else (following, last)


def _stop(sizes: Sequence[int], begin: int, room: int) -> int:
    """Return the end of the longest run of words from `begin` that fits, at least one word."""
    end, used = begin + 1, sizes[begin]
    while end < len(sizes) and used + sizes[end] <= room:
        used += sizes[end]
        end += 1
    return end


def first_of(pieces: Sequence[range]) -> list[int]:
    """Return the start of each run, -1 for an empty run."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int | None
) -> tuple[list[int], list[range]]:
    """Return the token ids of the words, joined by blanks, and the positions of each word's pieces.

    Words after `max_length` tokens have no pieces; None for no limit.
    """
    # By offsets and not by `is_split_into_words`: with it, byte-level tokenizers tokenize a word as
    # if no blank preceded it.
    encoded = tokenizer(
        " ".join(words),
        truncation=max_length is not None,
        max_length=max_length,
        verbose=False,  # a warning of long sentences would be wrong: windows follow
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
