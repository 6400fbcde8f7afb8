"""Masks whole words in the views of a sequence.

Every function is a pure function of its arguments. Rare words can be masked more often, by their
counts in the corpus.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from teachonce.store.extras.word_counts import WordCounts
from teachonce.support.arrays import Array, covering_spans
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.windows.window import storable
from teachonce.training.rare_masks import rare_weights, sampling_keys

MASK, RANDOM, KEEP = 0, 1, 2  # actions on a masked word: mask token, random token, unchanged
COUNTED_WORDS = 1 << 23  # counting takes about ten seconds, and 1 GB if all words differ

# Without U+3099 and U+309A, which are combining marks.
_CJK = "\u3005-\u3007\u3040-\u3098\u309b-\u30ff\u3100-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
_CJK += "\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af"
_ZERO_WIDTH_SPACE = "\u200b"
_SPANS, _TOKENS = 0, 1  # independent streams of draws for one key


class DrawKey(NamedTuple):
    """Determines the random draws for a sequence, numbered as in the store, in a view."""

    seed: int
    view: int
    sequence: int


def joins(character: str) -> bool:
    """Return whether a character modifies the character before it: a mark, a joiner, a skin
    tone."""
    # A zero-width space divides words, although it is in the category of joiners (Cf).
    if character == _ZERO_WIDTH_SPACE:
        return False
    kind = unicodedata.category(character)
    return kind in ("Mn", "Mc", "Me", "Cf") or "\U0001f3fb" <= character <= "\U0001f3ff"


def _ranges(codes: Iterable[int]) -> str:
    """Write code points as ranges of a regex character class."""
    first_last: list[list[int]] = []  # ranges match faster than a list of all characters
    for code in codes:
        if first_last and first_last[-1][1] == code - 1:
            first_last[-1][1] = code
        else:
            first_last.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in first_last)


@cache
def _word_pattern() -> re.Pattern[str]:
    # Cached, and not made at import: it looks at 135,000 characters, which takes 0.07 s.
    # Every mark and format character of Unicode is in these two ranges.
    codes = chain(range(0x20000), range(0xE0000, 0xE1000))
    mark = _ranges(code for code in codes if joins(chr(code)))
    letter = rf"[^\W{_CJK}]"
    run = rf"{letter}+(?:[{mark}]+{letter}*)*"
    symbol = rf"[^\s\w{mark}\x00-\x1f\x7f-\x9f{_ZERO_WIDTH_SPACE}]"
    return re.compile(
        rf"[{_CJK}][{mark}]*"
        rf"|{run}(?:['’]{run})*"
        r"|[\U0001f1e6-\U0001f1ff]{2}"  # a flag
        rf"|{symbol}[{mark}]*(?:(?<=\u200d){symbol}[{mark}]*)*"
    )


def maskable_spans(text: str) -> Array:
    """Find the words of a text: int32 [W, 2] of (begin, end), ascending.

    A word is one Chinese or Japanese character, a maximal run of letters, digits and underscores
    (with inner apostrophes: `don't`), or one other visible character; each with the marks and
    joiners that follow. White space, control characters and zero-width spaces belong to no word.
    Words do not depend on a tokenizer, so that any student can mask the same ones.
    """
    spans = (match.span() for match in _word_pattern().finditer(text))
    return np.fromiter(chain.from_iterable(spans), np.int32).reshape(-1, 2)


def maskable_words(text: str) -> list[str]:
    words: list[str] = _word_pattern().findall(text)
    return words


def cjk_positions(text: str) -> Array:
    """Find the positions of Chinese and Japanese characters: int64 [n], ascending."""
    return np.fromiter((match.start() for match in re.finditer(f"[{_CJK}]", text)), np.int64)


def mask_spans(
    text: str,
    seed: int,
    view: int,
    sequence: int,
    probability: float = 0.15,
    counts: WordCounts | None = None,
) -> Array:
    """Choose the words to mask in a view: int32 [M, 3] of (begin, end, action), ascending.

    M = max(1, floor(probability * W + u)) of W words, with u uniform in [0, 1): on average the
    share `probability` is masked, and at least one word. All words are equally likely; with the
    word `counts` of a corpus they are drawn without replacement by their `rare_weights`. The action
    is 0 (mask token) with probability 0.8, 1 (random token) 0.1, 2 (unchanged) 0.1 (Devlin et al.
    2019, section 3.1). View 0 has no masks.
    """
    spans = maskable_spans(text)
    if view == 0 or len(spans) == 0:
        return np.empty((0, 3), np.int32)
    draws = _uniform(1 + 2 * len(spans), DrawKey(seed, view, sequence), _SPANS)
    count = min(len(spans), max(1, int(probability * len(spans) + draws[0])))
    order, chance = draws[1:].reshape(2, -1)
    if counts is not None:
        order = sampling_keys(order, rare_weights(counts.of(maskable_words(text))))
    masked = np.sort(np.argsort(order, kind="stable")[:count])
    action = np.digitize(chance[masked], (0.8, 0.9))
    return np.column_stack((spans[masked], action)).astype(np.int32)


class MaskVocabulary(NamedTuple):
    """Holds the ids of a tokenizer that masking needs: mask token, size and special tokens."""

    mask: int
    size: int  # of the tokenizer: some models pad their embeddings with rows that are not trained
    special: Iterable[int]

    @classmethod
    def of(cls, tokenizer: Any) -> MaskVocabulary:
        """Read the ids from a transformers tokenizer."""
        return cls(tokenizer.mask_token_id, len(tokenizer), tokenizer.all_special_ids)


def masked_input(
    ids: Array,
    offsets: Array,
    special: Array,
    spans: Array,
    vocabulary: MaskVocabulary,
    key: DrawKey,
) -> Array:
    """Return the teacher's input in a view, ids [T].

    Ordinary tokens that share a character with a span are masked; a token over two spans gets the
    action of the first. Action 0 gives the mask token, 1 a random ordinary token, 2 the unchanged
    token. `key` is the key with which the spans were drawn.
    """
    if len(spans) == 0:
        return ids.copy()
    span = covering_spans(*offsets.T, *spans[:, :2].T)
    mask = (span >= 0) & ~special
    action = spans[span, 2]
    result = ids.copy()
    result[mask & (action == MASK)] = vocabulary.mask
    drawn = mask & (action == RANDOM)
    result[drawn] = _random_ids(len(ids), vocabulary, key)[drawn]
    return result


def _random_ids(count: int, vocabulary: MaskVocabulary, key: DrawKey) -> Array:
    """Draw int64 [count], uniform over the ids that are not special."""
    special = np.unique(np.fromiter(vocabulary.special, np.int64))
    special = special[special < vocabulary.size]
    ordinary = vocabulary.size - len(special)
    rank = (_uniform(count, key, _TOKENS) * ordinary).astype(np.int64)
    # Skip the special ids below the rank-th ordinary id.
    return rank + np.searchsorted(special - np.arange(len(special)), rank, side="right")


def _uniform(count: int, key: DrawKey, stream: int) -> Array:
    # Philox (Salmon et al. 2011) directly: numpy guarantees the raw output of a bit generator for
    # every version, but not the methods of `Generator`.
    generator = np.random.Philox(
        key=np.array([key.seed % 2**64, key.view], np.uint64),
        counter=np.array([0, 0, stream, key.sequence], np.uint64),
    )
    # The upper 53 bits, which a float64 represents exactly.
    return np.asarray(generator.random_raw(count) >> np.uint64(11)) * 2.0**-53


def count_words(corpus: Corpus) -> WordCounts:
    """Count the words of the first texts of every source, about COUNTED_WORDS in all, with an equal
    share for each source."""
    # Words, not tokens: so teachers with other tokenizers mask the same words.
    counts = Counter[str]()
    for source in corpus.sources:
        # A share for each source: else several languages would be counted in the first one alone.
        remaining = COUNTED_WORDS // len(corpus.sources)
        for row in source.rows():
            words = maskable_words(storable(row.text, Counter()))
            counts.update(words)
            remaining -= len(words)
            if remaining <= 0:
                break
    return WordCounts(counts)
