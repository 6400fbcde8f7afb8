"""Recognises a tokenizer that was made for another language than a text's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

TEXTS, WORDS = 200, 5000  # the first 25 words of each of 200 texts that are spread over all
LEAST = 100  # fewer words say nothing
FOREIGN = 2.5
"""Pieces per word from which a tokenizer counts as foreign. Measured on novels: a vocabulary of the
language has 1.1 (30,000 English pieces) to 2.1 (1,000 Russian pieces); the English one of MiniLM
has 2.2 on Slovak, 2.6 on German, 3.1 on Finnish and 5.2 on Russian text."""
UNKNOWN = 0.05
"""Share of words with an unknown piece, which a vocabulary of the language has under 1 %."""
# Numbers and marks are not words: tables and code would have many pieces with any vocabulary.
WORD = re.compile(r"[^\W\d_]+")
# Tibetan, Thai, Lao, Burmese, Khmer, kana and Han: no spaces divide their words.
UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
)


def note_on_pieces(tokenizer: Any, texts: Sequence[str]) -> str:
    """Return a hint if a tokenizer splits the words of texts into many pieces, else "".

    No hint is given if more than a tenth of the words are in scripts without spaces.
    """
    sample = texts[:: max(1, len(texts) // TEXTS)]
    per_text = WORDS // max(1, len(sample))
    words = [word for text in sample for word in WORD.findall(text)[:per_text]]
    if len(words) < LEAST or sum(map(bool, map(UNSPACED.search, words))) > len(words) / 10:
        return ""
    # Joined by spaces: byte-level tokenizers have other pieces for a word without a space before.
    ids = tokenizer(" ".join(words), add_special_tokens=False, verbose=False)["input_ids"]
    mean, unknown = len(ids) / len(words), ids.count(tokenizer.unk_token_id) / len(words)
    if mean < FOREIGN and unknown < UNKNOWN:
        return ""
    problem = f"splits a word of the text into {mean:.1f} pieces, where 1 to 2 are usual"
    if unknown >= UNKNOWN:
        problem = f"has no pieces for {unknown:.0%} of the text's words"
    return (
        f"the tokenizer {problem}: it was probably made for another language, or its vocabulary is"
        " small; take a model of the text's language"
    )
