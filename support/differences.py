"""Tell people where two JSON values differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.errors import ANOTHER, UserError

SHOWN = 60
BEFORE = 12


def differences(one: Any, other: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, one, other) for every value that differs, the values as quoted text.

    Long values are cut to where they begin to differ. `null` also stands for a missing value.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted(set(one) | set(other)):
            yield from differences(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{key}.{place}")
    elif one != other:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in (one, other)]
        begin = len(os.path.commonprefix(texts)) - BEFORE if max(map(len, texts)) > SHOWN else 0
        yield key, _cut(texts[0], max(0, begin)), _cut(texts[1], max(0, begin))


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Tell which values of `now` differ from `then`: "key was A and is B", or "" if none does."""
    keys = [key for key in sorted(now) if now[key] != then.get(key)]
    return ", ".join(f"{key} was {then.get(key)} and is {now[key]}" for key in keys)


def check_same(path: Path | str, found: Iterable[tuple[str, str, str]]) -> None:
    """Raise UserError, naming the arguments, if the unfinished store at a path was begun with
    others."""
    differ = [f"{key} is {old} in the store and {new} now" for key, old, new in found]
    if differ:
        raise UserError(
            f"{path}: holds an unfinished store with other arguments: {'; '.join(differ)}; use the"
            f" same arguments to go on, or {ANOTHER}"
        )


def _cut(text: str, begin: int) -> str:
    end = begin + SHOWN
    return repr("…" * (begin > 0) + text[begin:end] + "…" * (len(text) > end))
