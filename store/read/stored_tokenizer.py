"""The tokenizer that a store carries: loaded without what a stranger may have put into it, or used
in a process of its own where its work has no bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from teachonce.store.errors import StoreError
from teachonce.store.format.manifest import DAMAGED
from teachonce.store.format.pairs import tokenizer_inputs
from teachonce.support.bounded import MEMORY, Exceeded, run_bounded
from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 8  # tokens a byte of text, at most
LONGEST_WORD, LONGEST_PIECE = 1000, 1000  # characters; tokenizers have 100, and pieces of 16
AROUND = 64  # tokens around a text, at most
SECONDS, BYTES_A_SECOND = 60.0, 20_000  # of a processor: some fifty times what tokenizers take
PLAIN = {
    "normalizer": frozenset(
        {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Strip", "StripAccents"}
    ),
    "pre_tokenizer": frozenset(
        {
            "BertPreTokenizer",
            "ByteLevel",
            "Digits",
            "Metaspace",
            "Punctuation",
            "Whitespace",
            "WhitespaceSplit",
        }
    ),
    "model": frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"}),
    "post_processor": frozenset(
        {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
    ),
}
"""Kinds of the parts of a tokenizer whose time and memory are in proportion to a text: none with a
pattern or a replacement of a stranger's."""
INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
INNER |= {"post_processor": "processors"}
MOST_STEPS = 16  # of a sequence
SPARE_IDS = 10_000  # numbers that no piece has: memory for each is set aside


def load_tokenizer(data: bytes, where: str, written_with: object = None) -> Tokenizer:
    """Load the content of a tokenizer.json. Padding and truncation that it may ask for are off.

    Raises StoreError where it cannot be loaded.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise StoreError(
            f"{where} cannot be loaded ({first_line(error)}); install the version of tokenizers"
            f" that wrote it: {written_with}"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Read a file of a tokenizer or a model. Raises StoreError if it is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON ({first_line(error)}); {DAMAGED}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{where} is a {type(found).__name__}, expected an object; {DAMAGED}")
    return found


def is_plain(data: bytes) -> bool:
    """Whether the work and the output of a tokenizer.json are in proportion to a text."""
    try:
        settings = json.loads(data)
        steps = {name: _steps(settings.get(name), INNER.get(name, "")) for name in PLAIN}
        vocabulary, added = settings["model"]["vocab"], settings.get("added_tokens") or []
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary)]
        highest = max([*numbers, *(token["id"] for token in added)])
        return (
            all({step["type"] for step in steps[name]} <= PLAIN[name] for name in PLAIN)
            and all(len(found) <= MOST_STEPS for found in steps.values())
            and all(_added(step) <= AROUND for step in steps["post_processor"])
            and _proportionate(settings["model"])
            and 0 <= highest < 2 * (len(vocabulary) + len(added)) + SPARE_IDS
        )
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return False


def _added(step: dict[str, Any]) -> int:
    """Count the tokens that a post-processor adds to a text or a pair, at most."""
    ids = {name: len(token["ids"]) for name, token in (step.get("special_tokens") or {}).items()}
    pieces = [*step.get("single", ()), *step.get("pair", ())]
    return sum(ids[each["SpecialToken"]["id"]] if "SpecialToken" in each else 1 for each in pieces)


def _proportionate(model: dict[str, Any]) -> bool:
    """Whether a model's work grows with a text alone: WordPiece takes the square of a word's
    length, Unigram the length of its longest piece for each character."""
    if model["type"] == "Unigram":
        return all(len(piece) <= LONGEST_PIECE for piece, _ in model["vocab"])
    return int(model.get("max_input_chars_per_word", 0)) <= LONGEST_WORD


def _steps(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, sequences taken apart."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[inner] for step in _steps(each, inner)]


def within_bounds(
    data: bytes,
    text_bytes: int,
    where: str,
    here: Callable[[], Any],
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """The result of using the tokenizer `data` on so many bytes of text.

    `here()` gives it in this process, and `function(*arguments)`, with arguments and a result of
    JSON, in another one with bounds, which is used unless the tokenizer is plain. Raises StoreError
    for what goes beyond the bounds.
    """
    if is_plain(data):
        return here()
    try:
        seconds = SECONDS + text_bytes / BYTES_A_SECOND
        return run_bounded(function, *arguments, seconds=seconds, memory=MEMORY)
    except Exceeded as error:
        raise StoreError(
            f"{where}: the tokenizer in it {error}, for {text_bytes:,} bytes of text; do not use"
            " this store, or ask for one with another tokenizer"
        ) from None
    except UserError as error:
        raise StoreError(str(error)) from None
    except TypeError as error:
        raise StoreError(
            f"{where}: the tokenizer in it works in another process, which cannot be given these"
            f" storage options ({first_line(error)}); give plain ones, or the client's environment"
            " variables"
        ) from None


def encoded(
    tokenizer: Any, texts: list[str], where: str, separator: str | None = None
) -> list[Any]:
    """The encodings of texts, or of the pairs of texts that a separator divides.

    Raises StoreError for more tokens than a text can have, for a text that is no pair, and where
    the library fails.
    """
    inputs = tokenizer_inputs(texts, separator, where)
    try:
        found: list[Any] = tokenizer.encode_batch(inputs)
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise StoreError(f"{where}: the tokenizer in it failed: {first_line(error)}") from None
    for encoding, text in zip(found, texts, strict=True):
        if len(encoding.ids) > LONGEST * len(text.encode()) + AROUND:
            raise StoreError(
                f"{where}: the tokenizer in it gives {len(encoding.ids):,} tokens of a text of"
                f" {len(text):,} characters; do not use this store"
            )
    return found
