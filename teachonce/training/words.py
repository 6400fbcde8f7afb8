"""Finds the words of a text that a tagger tags. Exported programs use the same pattern."""

from __future__ import annotations

import re
from functools import cache

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

CJK = r"\p{Han}\p{Hiragana}\p{Katakana}"
RUN = rf"[^\s\p{{P}}\p{{S}}{CJK}]+"
# Not the words of the tokenizer: it divides U.S. and well-known, which files of words and tags do
# not, and a tagger of first pieces was never trained on the rest.
WORD = rf"[{CJK}]|{RUN}(?:[-.,'’&@/:_]{RUN})*|[\p{{P}}\p{{S}}]"
r"""A word: one Chinese or Japanese character, a run of other letters and digits with single marks
inside (`don't`, `U.S`, `1,000.5`), or one mark or symbol. `\p{...}` is understood by tokenizers."""


def word_spans(text: str, first: str = "") -> list[tuple[int, int]]:
    """Return the (begin, end) of the words of a text. If `first` is given (such as a mask token),
    each occurrence of it is one word."""
    pattern = f"{re.escape(first)}|{WORD}" if first else WORD
    return [span for _, span in _split(pattern).pre_tokenize_str(text)]


@cache
def _split(pattern: str) -> Split:
    return Split(Regex(pattern), "removed", invert=True)
