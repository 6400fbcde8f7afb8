"""The normalisers of a `tokenizer.json` as functions of one piece, with `unicodedata` only.

They run on pieces, not on whole texts. So steps that only write or remove the marks of word starts
(Prepend, Strip, Replace of spaces) do nothing here. SentencePiece's compiled table (Precompiled) is
approximated: NFKC, without control characters, and with spaces for white space. The table differs
from this in a few rare characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from teachonce.align.text import AlignmentError

Normaliser = Callable[[str], str]


def normaliser_of(settings: dict[str, Any] | None) -> Normaliser:
    """Return the function of the `normalizer` entry of a tokenizer.json (None: the identity).

    Raises AlignmentError for an unknown type, and for an expression that Python's `re` cannot
    compile.
    """
    if settings is None:
        return str
    match kind := settings.get("type"):
        case "Sequence":
            return _chain([normaliser_of(step) for step in settings["normalizers"]])
        case "BertNormalizer":
            return _bert(settings)
        case "Lowercase":
            return lower
        case "NFC" | "NFD" | "NFKC" | "NFKD":
            return lambda text: unicodedata.normalize(kind, text)
        case "StripAccents":
            return strip_marks
        case "Replace":
            return _replace(settings)
        case "Nmt":
            return clean
        case "Precompiled":
            return lambda text: unicodedata.normalize("NFKC", clean(text))
        case "Prepend" | "Strip" | "ByteLevel":  # they mark words of a whole text
            return str
    raise AlignmentError(
        f"tokenizer.json, normalizer: unknown type {kind!r}; choose another tokenizer"
    )


def lower(text: str) -> str:
    """Lower-case each character by itself, as `tokenizers` does."""
    # str.lower of a whole text writes a sigma at the end of a word differently.
    return "".join(map(str.lower, text))


def clean(text: str) -> str:
    """Clean a text as BERT's `clean_text` does.

    Drops control characters, NUL and U+FFFD, and replaces white space by spaces.
    """
    cleaned = []
    for character in text:
        # These three are control characters as well, which are dropped below.
        if character in "\t\n\r" or unicodedata.category(character)[0] == "Z":
            cleaned.append(" ")
        elif character != "\ufffd" and unicodedata.category(character)[0] != "C":
            cleaned.append(character)
    return "".join(cleaned)


def strip_marks(text: str) -> str:
    """Drop combining marks (M*). Composed letters are unchanged unless decomposed before."""
    return "".join(c for c in text if unicodedata.category(c)[0] != "M")


def _strip_accents(text: str) -> str:
    # As BertNormalizer does: it decomposes first and drops Mn alone, unlike StripAccents.
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def _chain(steps: list[Normaliser]) -> Normaliser:
    def normalise(text: str) -> str:
        for step in steps:
            text = step(text)
        return text

    return normalise


def _bert(settings: dict[str, Any]) -> Normaliser:
    lowercase = settings.get("lowercase", True)
    accents = settings.get("strip_accents")
    # In a BertNormalizer, `strip_accents: null` means the value of `lowercase`.
    steps: list[Normaliser] = []
    if settings.get("clean_text", True):
        steps.append(clean)
    if lowercase if accents is None else accents:
        steps.append(_strip_accents)
    if lowercase:
        steps.append(lower)
    return _chain(steps)


def _replace(settings: dict[str, Any]) -> Normaliser:
    pattern, content = settings["pattern"], settings["content"]
    expression = pattern.get("Regex", re.escape(pattern.get("String", "")))
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise AlignmentError(
            f"tokenizer.json, normalizer: Python cannot compile the expression {expression!r}:"
            f" {error}; choose another tokenizer"
        ) from None
    # A rule that replaces spaces, or that inserts ▁, only marks the starts of words.
    if compiled.search(" ") or compiled.search("  ") or "\u2581" in content:
        return str
    # A function, as re would read backslashes in `content` as references to groups.
    return lambda text: compiled.sub(lambda _: content, text)
