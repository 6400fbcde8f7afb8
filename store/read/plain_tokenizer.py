"""Decide whether an untrusted tokenizer.json is plain: whether it alone shows that its time and
memory are proportional to its input.

A step that the lists here lack costs time, not safety: such a tokenizer runs with bounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

LONGEST_WORD = 200  # characters: WordPiece takes the square of it in time; BERT has 100
LONGEST_PIECE = 256  # characters: Unigram looks this far ahead from each character
PIECES_CHARACTERS = 1 << 24  # of all pieces: a Unigram's trie takes about 100 bytes for each
LONGEST_MARK = 16  # characters that a model puts before or after each character or piece
LONGEST_ADDED = 1000  # characters of an added token
ADDED_CHARACTERS = 1 << 20  # of all added tokens: their automaton takes about 100 bytes for each
AROUND = 64  # tokens around a text, at most
MOST_STEPS = 8  # of a normalizer, pre-tokenizer or post-processor
SPARE_IDS = 10_000  # ids without a piece, for each of which memory is allocated
DELETING = frozenset({"BertNormalizer", "Strip", "StripAccents"})  # may leave nothing of a text
Settings = dict[str, Any]

NORMALIZERS = frozenset({"Lowercase", "NFC", "NFD", "NFKC", "NFKD"}) | DELETING
PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "Digits",
        "Metaspace",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
    }
)
PROCESSORS = frozenset({"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"})


class _NotPlain(ValueError):
    """Raised if a tokenizer has an unlisted step, or a repeated JSON key, which readers resolve
    differently."""


@lru_cache(8)  # of each tokenizer, megabytes of JSON are parsed once
def is_plain(data: bytes) -> bool:
    """Return whether a tokenizer.json has only steps whose time, memory and output are
    proportional to the text. False for any other content, and for invalid JSON."""
    try:
        settings = json.loads(data, object_pairs_hook=_unique)
        steps = [
            _steps(settings.get("normalizer"), "normalizers", NORMALIZERS),
            _steps(settings.get("pre_tokenizer"), "pretokenizers", PRE_TOKENIZERS),
            _steps(settings.get("post_processor"), "processors", PROCESSORS),
        ]
        normalizers, pre_tokenizers, processors = steps
        model, added = settings["model"], settings.get("added_tokens") or []
        return (
            # each turns a byte into a character of up to two bytes
            sum(step["type"] == "ByteLevel" for step in pre_tokenizers) <= 1
            and all(map(_adds_few_tokens, processors))
            and _plain_model(model)
            and _plain_added(added, {step["type"] for step in normalizers})
            and _dense(model["vocab"], added)
        )
    # Untrusted settings may have any shape: missing keys, other types, deep nesting.
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return False


def _unique(pairs: list[tuple[str, Any]]) -> Settings:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise _NotPlain
    return settings


def _steps(part: Any, inner: str, allowed: frozenset[str]) -> list[Settings]:
    """List the steps of a part of a tokenizer, sequences flattened. Raises _NotPlain for unlisted
    or too many steps."""
    if part is None:
        return []
    steps = [part]
    if part["type"] == "Sequence":
        steps = [step for item in part[inner] for step in _steps(item, inner, allowed)]
    if len(steps) > MOST_STEPS or not {step["type"] for step in steps} <= allowed:
        raise _NotPlain
    return steps


def _adds_few_tokens(step: Settings) -> bool:
    """Return whether a post-processor yields each text once, with few tokens around it."""
    if step["type"] != "TemplateProcessing":
        return True
    ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
    for template, texts in ((step["single"], ["A"]), (step["pair"], ["A", "B"])):
        sequences = [piece["Sequence"]["id"] for piece in template if "Sequence" in piece]
        around = [ids[piece["SpecialToken"]["id"]] for piece in template if "Sequence" not in piece]
        if sorted(sequences) != texts or sum(around) > AROUND:
            return False
    return True


def _plain_model(model: Settings) -> bool:
    kind, pieces = model["type"], model["vocab"]
    if kind == "Unigram":
        pieces = [piece for piece, _ in pieces]
        longest, shortest = max(map(len, pieces)), min(map(len, pieces))
        return 0 < shortest <= longest <= LONGEST_PIECE and _fit(pieces, PIECES_CHARACTERS)
    marks = ("continuing_subword_prefix", "end_of_word_suffix")
    return (
        kind in ("BPE", "WordLevel", "WordPiece")
        and all(len(model.get(mark) or "") <= LONGEST_MARK for mark in marks)
        and int(model.get("max_input_chars_per_word", 0)) <= LONGEST_WORD
        and not model.get("dropout")
        and _fit(pieces, PIECES_CHARACTERS)
    )


def _plain_added(added: list[Settings], normalizers: set[str]) -> bool:
    """Return whether no added token can be normalised to an empty text."""
    # `tokenizers` finds an empty token at every place and never ends.
    deleting = bool(normalizers & DELETING)
    contents = [token["content"] for token in added]
    solid: Callable[[str], bool] = _stays_visible if deleting else bool
    return (
        all(type(text) is str and len(text) <= LONGEST_ADDED and solid(text) for text in contents)
        and len(set(contents)) == len(contents)
        and _fit(contents, ADDED_CHARACTERS)
    )


def _stays_visible(text: str) -> bool:
    """Return whether a text has a character that no listed normalizer deletes."""
    return any("!" <= character <= "~" for character in text)


def _fit(texts: Any, characters: int) -> bool:
    return sum(map(len, texts)) <= characters


def _dense(vocabulary: Any, added: list[Settings]) -> bool:
    """Return whether nearly every id up to the highest one has a token."""
    # A Unigram's vocabulary is a list, in which the position of a piece is its id.
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary)]
    every = [*numbers, *(token["id"] for token in added)]
    limit = 2 * (len(vocabulary) + len(added)) + SPARE_IDS
    return all(type(number) is int for number in every) and 0 <= min(every) <= max(every) < limit
