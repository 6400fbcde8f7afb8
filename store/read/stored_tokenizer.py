"""Load and run the tokenizer in a store, which is untrusted input.

A tokenizer that is not plain (`plain_tokenizer.py`) runs in a process with bounds on time and
memory.
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
from teachonce.store.read.plain_tokenizer import AROUND, is_plain
from teachonce.support import bounded
from teachonce.support.bounded import LimitExceeded, run_bounded
from teachonce.support.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 8  # maximum of tokens for a byte of text
SECONDS, BYTES_A_SECOND = 60.0, 20_000  # of a processor: some fifty times what tokenizers need
MEMORY = 3 << 30  # bytes of address space: a vocabulary of 250,000 pieces takes a fifth


def load_tokenizer(data: bytes, where: str, written_with: object = None) -> Tokenizer:
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
    """Raise `refusal(error)` for an error of the library."""
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


# One run loads a tokenizer for several purposes, and a process with bounds tries it once.
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
