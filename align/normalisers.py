"""The normalisers of a `tokenizer.json` as functions of one piece, with `unicodedata` only.

They run on pieces, not on whole texts: steps that only set or clean the marks of word starts
(Prepend, Strip, Replace of blanks) do nothing here. SentencePiece's compiled table (Precompiled) is
taken as NFKC with control characters dropped and white space as blanks, which differs from it in a
few rare characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from teachonce.align.text import AlignmentError

Normaliser = Callable[[str], str]
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
WHOLE_TEXT_ONLY = ("Prepend", "Strip", "ByteLevel")


def normaliser_of(settings: dict[str, Any] | None) -> Normaliser:
    """Make the function for the `normalizer` entry of a tokenizer.json (None: the identity).

    Raises AlignmentError for a type that is not known or an expression that Python's `re` cannot
    read.
    """
    if settings is None:
        return str
    kind = settings.get("type")
    if kind == "Sequence":
        return _chain([normaliser_of(step) for step in settings["normalizers"]])
    if kind == "BertNormalizer":
        return _bert(settings)
    if kind == "Lowercase":
        return lower
    if kind in FORMS:
        return lambda text: unicodedata.normalize(kind, text)
    if kind == "StripAccents":
        return strip_marks
    if kind == "Replace":
        return _replace(settings)
    if kind == "Nmt":
        return clean
    if kind == "Precompiled":
        return lambda text: unicodedata.normalize("NFKC", clean(text))
    if kind in WHOLE_TEXT_ONLY:
        return str
    raise AlignmentError(f"tokenizer.json, normalizer: the type {kind!r} is not known")


def lower(text: str) -> str:
    """Lower case character by character, as `tokenizers` does (no final sigma)."""
    return "".join(map(str.lower, text))


def clean(text: str) -> str:
    """Clean as BERT's clean_text: drop control characters, NUL and U+FFFD, make white space a
    blank."""
    kept = []
    for character in text:
        if character in "\t\n\r" or unicodedata.category(character)[0] == "Z":
            kept.append(" ")
        elif character != "\ufffd" and unicodedata.category(character)[0] != "C":
            kept.append(character)
    return "".join(kept)


def strip_marks(text: str) -> str:
    """Drop combining marks (M*); composed letters stay unless decomposed before."""
    return "".join(c for c in text if unicodedata.category(c)[0] != "M")


def _strip_accents(text: str) -> str:
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
            f"tokenizer.json, normalizer: cannot read the expression {expression!r}: {error}"
        ) from None
    if compiled.search(" ") or compiled.search("  ") or "\u2581" in content:
        return str
    return lambda text: compiled.sub(lambda _: content, text)
