"""JSON values altered at random."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 7, 2**31, 2**40, 2**63, 10**30, 1.5, -1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "a/../../b", "int64", "object", "<f8", "\x00",
    "\ud800", "💥" * 99, [], {}, [[]], [0], [-1], [2**40], [2**62, 2**62], {"a": 1}, {"": {}},
    "DEEP",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of everything in a JSON value except the value itself."""
    found = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in found:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def mutated(value: Any, chance: random.Random) -> Any:
    """Copy a JSON value with one item in it removed, repeated, renamed or replaced."""
    value = copy.deepcopy(value)
    *path, key = chance.choice(list(places(value)))
    holder = value
    for step in path:
        holder = holder[step]
    kind = chance.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == 1:
        holder[chance.choice(["../up", "/abs", "..", "parts/0", "x" * 999, ""])] = holder.pop(key)
    elif kind == 2 and type(holder[key]) is int:
        holder[key] = holder[key] * chance.choice([-1, 2, 10**6, 10**12]) + chance.randrange(3)
    else:
        holder[key] = chance.choice(JUNK)
    return value


def text(value: Any) -> bytes:
    """Encode JSON as stored; replace "DEEP" by lists within lists, deeper than a parser allows."""
    return json.dumps(value).replace('"DEEP"', DEEP).encode("ascii")
