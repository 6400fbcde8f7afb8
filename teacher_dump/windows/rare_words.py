"""Counts how often words occur, so that rare ones can be masked more often."""

from __future__ import annotations

from collections import Counter

from teachonce.store.extras.word_counts import WordCounts
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.windows.masked_views import words_of
from teachonce.teacher_dump.windows.window import storable

COUNTED_WORDS = 1 << 23  # takes some ten seconds, and a gigabyte if all of them differ


def count_words(corpus: Corpus) -> WordCounts:
    """Count the words of the first texts of every source, up to COUNTED_WORDS in all.

    Words are counted, not tokens, so that teachers with other tokenizers mask the same words.
    """
    counts = Counter[str]()
    for source in corpus.sources:
        left = COUNTED_WORDS // len(corpus.sources)
        for row in source.rows():
            words = words_of(storable(row.text, Counter()))
            counts.update(words)
            left -= len(words)
            if left <= 0:
                break
    return WordCounts(counts)
