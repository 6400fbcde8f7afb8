"""Words as tokens: which tokens are whose, and windows of sentences that are too long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OVERLAP = 3
"""Two windows share a third of their tokens, as in the task qa."""


@dataclass(frozen=True, slots=True)
class WordWindow:
    """A stretch of a sentence. `words` are the numbers of its words, `own` of those whose tags are
    taken from here: the others are in the middle of the window next to it. `pieces` are the
    positions in `ids` of each of `words`."""

    words: range
    own: range
    ids: list[int]
    pieces: list[range]


def word_windows(tokenizer: Any, words: Sequence[str], limit: int) -> Iterator[WordWindow]:
    """Yield the windows of a sentence, of at most `limit` tokens each; one if all of it fits.

    A word that alone has more tokens is cut.
    """
    ids, pieces = word_pieces(tokenizer, words, None)
    if len(ids) <= limit:
        yield WordWindow(range(len(words)), range(len(words)), ids, pieces)
        return
    room = max(1, limit - tokenizer.num_special_tokens_to_add(pair=False))
    sizes, begin, first = [len(run) for run in pieces], 0, 0
    while begin < len(words):
        end = _stop(sizes, begin, room)
        # tokens of a stretch may differ from its tokens in the sentence
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
    """Return the word behind the last that fits, at least one."""
    end, used = begin + 1, sizes[begin]
    while end < len(sizes) and used + sizes[end] <= room:
        used += sizes[end]
        end += 1
    return end


def first_of(pieces: Sequence[range]) -> list[int]:
    """Return where each run begins, -1 for an empty one."""
    return [run.start if run else -1 for run in pieces]


def word_pieces(
    tokenizer: Any, words: Sequence[str], max_length: int | None
) -> tuple[list[int], list[range]]:
    """Return token ids of the words joined by blanks, and the positions of each word's pieces.

    Words behind `max_length` tokens have none; None for all tokens.

    Positions come from character offsets, not from `is_split_into_words`, because byte-level
    tokenizers treat words given apart as if no blank preceded them.
    """
    encoded = tokenizer(
        " ".join(words),
        truncation=max_length is not None,
        max_length=max_length,
        verbose=False,  # a sentence may be longer than the model takes
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
