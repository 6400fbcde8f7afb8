"""Parse untrusted text: whole numbers, paths on this machine, and files in JSON or TOML.

The size of a file is bounded, and JSON is checked against a schema. Errors are one line.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line
from teachonce.support.redaction import redacted

MOST_BYTES = 1 << 26  # most bytes of a JSON file
MOST_TOML_BYTES = 1 << 20
LARGEST = 1e30  # largest magnitude of a number: its square is finite in float64
MOST_DIGITS = 18  # 18 digits fit into int64; int() raises ValueError above 4,300 digits
# Not \d, which matches the digits of every script.
DIGITS = f"[0-9]{{1,{MOST_DIGITS}}}"

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Start of a URL, also if pathlib has removed its second slash."""


COPY = "give one, and copy from or to the URL by other means (a store by feature-store convert)"
AS_TEXT = "give one, or give the URL as a string with two slashes"


def local_path(path: str | os.PathLike[str], remedy: str = COPY) -> Path:
    """Return a path on this machine. Raises UserError, which ends in `remedy`, for a URL, and for
    `Path("s3://a")`, which would be a folder `s3:` here."""
    if URL.match(str(path)) or "://" in str(path):
        where = redacted(str(path))
        raise UserError(f"{where}: is a URL, expected a path on this machine; {remedy}")
    return Path(path)


def read_small(path: Path, most: int = MOST_BYTES) -> str:
    """Read a UTF-8 text file. Raises UserError if it is not a regular file (reading a pipe would
    block), has more than `most` bytes, or is not UTF-8."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: is a pipe, a device or a folder; give an ordinary file")
        with path.open("rb") as file:
            # Not by st_size, which is 0 for files of /proc and may change before the read.
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(
                f"{path}: has more than {most:,} bytes, so it is not read; check that it is the"
                " right file"
            )
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: cannot be read ({cause}); check the file") from None


def read_json(path: Path, shape: Any, remedy: str = "") -> Any:
    """Read a JSON file, and check it against the schema `shape`; see `schema_violation`. Raises
    UserError, which names file and key, and ends in `remedy`."""
    text = read_small(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Lists that are nested a thousand deep raise RecursionError.
        raise UserError(f"{path}: is not JSON ({first_line(error)}){remedy}") from None
    if problem := schema_violation(content, shape):
        raise UserError(f"{path}: {problem}{remedy}")
    return content


def schema_violation(value: Any, shape: Any, place: str = "it") -> str:
    """Describe where a JSON value violates a schema; "" if it does not.

    A schema is str, int, float (any number, NaN and infinity included), bool, dict or object (any
    value); a list with one schema, for lists; a tuple of values, one of which is expected; or a
    dictionary of schemas by key. A key that ends with ? may be missing, and "*" is any other key.
    """
    if isinstance(shape, dict):
        return _misfit_object(value, shape, place)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is {_kind(value)}, expected a list"
        problems = (schema_violation(one, shape[0], f"{place}[{n}]") for n, one in enumerate(value))
        return next(filter(None, problems), "")
    if isinstance(shape, tuple):
        # Types are compared as well, because True equals 1 in Python.
        fits = any(value == one and type(value) is type(one) for one in shape)
        return "" if fits else f"{place} is {value!r:.40}, expected one of {', '.join(shape)}"
    if shape is object:
        return ""
    if shape is float or shape is int:
        return _misfit_number(value, shape, place)
    if not isinstance(value, shape):
        return f"{place} is {_kind(value)}, expected {NAMES[shape]}"
    if shape is str and not _is_text(value):
        return f"{place} is {value!r:.40}, which is not a valid string"
    return ""


NAMES = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}


def _misfit_object(value: Any, shape: dict[str, Any], place: str) -> str:
    if not isinstance(value, dict):
        return f"{place} is {_kind(value)}, expected an object"
    named = {key.removesuffix("?"): inner for key, inner in shape.items() if key != "*"}
    for key in shape:
        if key != "*" and not key.endswith("?") and key not in value:
            return f"{key} of {place} is missing" if place != "it" else f"{key} is missing"
    for key, inner in value.items():
        if not _is_text(key):
            return f"a key of {place} is {key!r:.40}, which is not a valid string"
        schema = named.get(key, shape.get("*", object))
        if problem := schema_violation(inner, schema, key if place == "it" else f"{place}.{key}"):
            return problem
    return ""


def _misfit_number(value: Any, shape: type, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{place} is {_kind(value)}, expected a number"
    if shape is int and not isinstance(value, int):
        return f"{place} is {value!r:.40}, expected a whole number"
    if abs(value) > LARGEST and not (isinstance(value, float) and math.isinf(value)):
        return f"{place} is {str(value):.20}..., which is too large"
    return ""


def _is_text(value: str) -> bool:
    """Return whether a string can be written as UTF-8 and has no NUL, as in a file name."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _kind(value: Any) -> str:
    return "null" if value is None else NAMES.get(type(value), "a number")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises UserError if it is not TOML, and like `read_small`."""
    import tomllib  # not at the top: --help reads no TOML

    text = read_small(path, MOST_TOML_BYTES)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not TOML ({error}); correct it") from None


def whole_number(word: str, most: int = MOST_DIGITS) -> int | None:
    """Parse a number of at most `most` ASCII digits; return None for any other text."""
    return int(word) if len(word) <= most and re.fullmatch(DIGITS, word) else None
