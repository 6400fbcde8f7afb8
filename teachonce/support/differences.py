"""Lists the differences of two JSON values, for error messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from teachonce.support.console import takes_option
from teachonce.support.errors import ANOTHER, UserError

SHOWN = 60  # characters of a value
BEFORE = 12  # characters shown before the first difference
LISTED = 4  # differences in a message: two unrelated stores would fill a screen
ABSENT = "not given"
"""Text for a value that is missing or null."""


def differences(one: Any, other: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, value in `one`, value in `other`) for every value that differs. Values are
    text; both are in quotes unless they are plain words or numbers.

    Long values are cut to SHOWN characters around the first difference.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(set(one) | set(other)):
            yield from differences(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{key}.{index}")
    elif one != other:
        yield key, *_side_by_side(one, other)


def _side_by_side(one: Any, other: Any) -> tuple[str, str]:
    """Return two values as text. Lists of texts, or of objects with a name such as the files of a
    corpus, are shown as lists of names if the names differ."""
    lists = isinstance(one, list) and isinstance(other, list)
    names = [_names(one), _names(other)] if lists else [None, None]
    named = None not in names and names[0] != names[1]
    plain = [value if isinstance(value, str) else json.dumps(value) for value in (one, other)]
    texts = [str(name) for name in names] if named else plain
    begin = len(os.path.commonprefix(texts)) - BEFORE if max(map(len, texts)) > SHOWN else 0
    shown = [_cut(text, max(0, begin)) for text in texts]
    # Without quotes as on a command line. `repr` also escapes line breaks.
    if not named and any(quote(text) != text for text in shown):
        shown = list(map(repr, shown))
    left, right = (
        ABSENT if value is None else text for value, text in zip((one, other), shown, strict=True)
    )
    return left, right


def _names(values: Sequence[Any]) -> str | None:
    """Return the items of a list in one line: each text, and the name of each object. Returns
    "none" for an empty list, and None if an item is neither a text nor an object with a name."""
    named = [{"name": value} if isinstance(value, str) else value for value in values]
    names = [value.get("name") if isinstance(value, Mapping) else None for value in named]
    return None if None in names else ", ".join(map(str, names)) or "none"


def first_few(differ: Sequence[str]) -> str:
    """Join the first LISTED differences into one text, which ends with the number of further
    ones."""
    rest = [f"and {len(differ) - LISTED:,} more"] if len(differ) > LISTED else []
    return "; ".join([*differ[:LISTED], *rest])


# Names for messages of those parts of a store's identity and features that are no options.
NOUNS = {
    "teacher": "the model",
    "tokenizer_hash": "the model's tokenizer",
    "features.width": "the model's hidden size",
    "features.vocabulary": "the model's vocabulary",
    "config": "config.json",
    "corpus": "the corpus",
    "embedding": "the text vectors",
    "encodings": "the codec",
    "mixed_vocab": "the student's vocabulary",
}
GROUPS = ("identity.arguments.", "identity.", "arguments.", "features.")


def describe_differences(changes: Iterable[tuple[str, str, str]]) -> list[str]:
    """Describe `differences` of a store's identity and features: "--views is A in the store and B
    now". A value in both identity and features is listed once; if --codec differs, the encodings
    that follow from it are not listed."""
    lines = dict[str, str]()
    for key, old, new in changes:
        lines.setdefault(_readable(key), f"is {old} in the store and {new} now")
    if "--codec" in lines:
        lines = {
            name: line for name, line in lines.items() if not name.startswith(NOUNS["encodings"])
        }
    return [f"{name} {line}" for name, line in lines.items()]


def _readable(key: str) -> str:
    """Return a dotted key as an option or as words: `the corpus (source 1, bytes)` for
    `identity.corpus.sources.0.bytes`."""
    group = next((prefix for prefix in GROUPS if key.startswith(prefix)), "")
    name, *rest = key.removeprefix(group).split(".")
    if rest[:1] == ["sources"] and len(rest) > 1 and rest[1].isdecimal():
        rest = [f"source {int(rest[1]) + 1}", *rest[2:]]
    noun = NOUNS.get(f"{group}{name}") or NOUNS.get(name)
    if noun is None:
        option = takes_option(name) is not False
        noun = f"--{name.replace('_', '-')}" if option else name.replace("_", " ")
    return noun + (f" ({', '.join(rest)})" if rest else "")


def describe_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the values of `now` that differ from `then`: "key was A and is B"; "" if none
    does."""
    keys = [key for key in sorted(now) if now[key] != then.get(key)]
    return ", ".join(f"{key} was {then.get(key)} and is {now[key]}" for key in keys)


def check_same(
    path: Path | str, changes: Iterable[tuple[str, str, str]], versions: str = ""
) -> None:
    """Raise UserError if the unfinished store at `path` was started with other arguments.

    changes: the result of `differences`. versions: names libraries whose versions have changed
        since the start, which may be the cause.
    """
    differ = describe_differences(changes)
    if differ:
        also = f", and the same versions ({versions})" if versions else ""
        raise UserError(
            f"{path}: holds an unfinished store with other arguments: {first_few(differ)}; use the"
            f" same arguments{also} to continue, or {ANOTHER}"
        )


def _cut(text: str, begin: int) -> str:
    end = begin + SHOWN
    return "…" * (begin > 0) + text[begin:end] + "…" * (len(text) > end)
