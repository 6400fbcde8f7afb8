"""How SQuAD compares two answers (Rajpurkar et al. 2016, section 6.1)."""

from __future__ import annotations

import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(answer: str) -> list[str]:
    """Words in lower case without ASCII punctuation and English articles."""
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


def exact_match(found: str, gold: str) -> float:
    """1 where nothing is left to tell them apart, else 0."""
    return float(normalised(found) == normalised(gold))


def word_f1(found: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words; without words, 1 where neither has any."""
    ours, theirs = normalised(found), normalised(gold)
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))
