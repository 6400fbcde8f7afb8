"""Load and run the tokenizer in a store, which is untrusted input.

A tokenizer is plain if its tokenizer.json alone shows that its time and memory are proportional to
its input. Any other runs in a process with bounds on time and memory, so a step that the lists here
lack costs time, not safety.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from teachonce.store.errors import StoreError
from teachonce.store.format.manifest import DAMAGED
from teachonce.store.format.sequences import tokenizer_inputs
from teachonce.support import bounded
from teachonce.support.bounded import LimitExceeded, run_bounded
from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 8  # maximum of tokens for a byte of text
SECONDS, BYTES_A_SECOND = 60.0, 20_000  # of a processor: some fifty times what tokenizers need
MEMORY = 3 << 30  # bytes of address space: a vocabulary of 250,000 pieces takes a fifth

# Bounds of a plain tokenizer.
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


def parse_tokenizer(data: bytes, where: str, written_with: object = None) -> Tokenizer:
    """Load the content of a tokenizer.json, with padding and truncation turned off.

    A tokenizer that is not plain is first loaded in a process with bounds. Raises StoreError if it
    cannot be loaded in that process or in this one.
    """
    # A process that has bounds already needs no second one.
    if not bounded.inside and not is_plain(data):
        try:
            _try_loading(data)
        except LimitExceeded as error:
            raise StoreError(
                f"{where}: loading it {error}; do not use this store, or dump one with another"
                " tokenizer"
            ) from None
        except UserError as error:
            raise _unloadable(where, error, written_with) from None
    with _refused(lambda error: _unloadable(where, error, written_with)):
        return _loaded(data)


@contextmanager
def _refused(refusal: Callable[[BaseException], StoreError]) -> Iterator[None]:
    """Replace an error of the `tokenizers` library in the `with` block by the StoreError
    `refusal(error)`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise refusal(error) from error


def _unloadable(where: str, error: BaseException, written_with: object) -> StoreError:
    remedy = f"install the version of tokenizers that wrote it: {written_with}"
    if written_with is None:
        remedy = "install a newer version of tokenizers, or make the store again"
    return StoreError(f"{where} cannot be loaded ({first_line(error)}); {remedy}")


def _loaded(data: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    # A file may ask to pad each text to any length, and would decide how much memory that takes.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# A command loads the same tokenizer for several purposes; the cache makes one trial suffice.
@lru_cache(8)
def _try_loading(data: bytes) -> None:
    """Load a tokenizer in a process with bounds. Raises as `run_bounded` does."""
    # Arguments travel as JSON; in latin-1 each byte is a character.
    run_bounded(_load_there, data.decode("latin-1"), seconds=SECONDS, memory=MEMORY)


def _load_there(data: str) -> None:
    _loaded(data.encode("latin-1"))


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Read a file of a tokenizer or a model. Raises StoreError if it is not a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON ({first_line(error)}); {DAMAGED}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{where} is a {type(value).__name__}, expected an object; {DAMAGED}")
    return value


def within_bounds(
    data: bytes,
    text_bytes: int,
    where: str,
    here: Callable[[], Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    """Run the tokenizer `data` on `text_bytes` bytes of text; return the result.

    If the tokenizer is plain, `here()` runs in this process. Otherwise `function(*arguments)` runs
    in a process with bounds; its arguments and result are JSON. Raises StoreError if it exceeds the
    bounds.
    """
    if is_plain(data):
        return here()
    try:
        seconds = SECONDS + text_bytes / BYTES_A_SECOND
        return run_bounded(function, *arguments, seconds=seconds, memory=MEMORY)
    except LimitExceeded as error:
        raise StoreError(
            f"{where}: the tokenizer in it {error}, for {text_bytes:,} bytes of text; use"
            " another store, or dump one with another tokenizer"
        ) from None
    except UserError as error:
        raise StoreError(str(error)) from None
    except TypeError as error:  # of all arguments, only storage options may be no JSON
        raise StoreError(
            f"{where}: the tokenizer in it runs in another process, which receives only JSON, and"
            f" these storage options are not JSON ({first_line(error)}); set the client's"
            " environment variables instead"
        ) from None


def encoded(
    tokenizer: Any, texts: list[str], where: str, separator: str | None = None
) -> list[Any]:
    """Tokenize texts, or pairs of texts that `separator` divides; return their encodings.

    Raises StoreError for more tokens than a text can have, for a text that is not a pair, and if
    the `tokenizers` library fails.
    """
    inputs = tokenizer_inputs(texts, separator, where)
    problem = f"{where}: the tokenizer in it failed"
    with _refused(lambda error: StoreError(f"{problem}: {first_line(error)}")):
        encodings: list[Any] = tokenizer.encode_batch(inputs)
    for encoding, text in zip(encodings, texts, strict=True):
        if len(encoding.ids) > LONGEST * len(text.encode()) + AROUND:
            raise StoreError(
                f"{where}: the tokenizer in it gives {len(encoding.ids):,} tokens for a text of"
                f" {len(text):,} characters; do not use this store"
            )
    return encodings


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
            # each ByteLevel turns a byte into a character of up to two bytes
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
