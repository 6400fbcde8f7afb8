"""The registry: which codec a store of each level (`exact`, `default`, `small`) uses for what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from teachonce.store.errors import StoreError
from teachonce.store.format.codecs.built_in import (
    Coarse,
    Fixed,
    Float16,
    Float32,
    Int4,
    Int8,
    Root,
    Square,
)
from teachonce.store.format.codecs.codec import (
    DENSE,
    FAST,
    Codec,
    Elementwise,
    HiddenCodec,
    Packing,
)
from teachonce.support.arrays import Array, Floats
from teachonce.support.plugins import added_object

KINDS = ("hidden", "logprobs", "rest", "head", "attention")
"""What every store has a codec for, whether it holds these or not."""


@dataclass(frozen=True)
class Level:
    """The codecs of a store; `ids` is how whole numbers beside its logits are packed."""

    hidden: HiddenCodec
    logprobs: Elementwise
    rest: Elementwise
    head: Codec
    attention: Elementwise
    ids: Packing = FAST
    embedding: Codec = Int8()

    def encodings(self, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
        """What undoes the lossy arrays of these kinds (JSON)."""
        return {kind: dict(getattr(self, kind).description) for kind in kinds}

    def unlike(
        self, found: Mapping[str, Any], kinds: tuple[str, ...] = KINDS
    ) -> list[tuple[str, Any, Any]]:
        """(dotted key, expected, found) of what decodes otherwise by the encodings `found`; prose
        and keys that no codec knows are not compared."""
        unlike = []
        for kind in kinds:
            codec, described = getattr(self, kind), found.get(kind)
            described = described if isinstance(described, Mapping) else {}
            for key in codec.unlike(described):
                unlike.append((f"{kind}.{key}", codec.description.get(key), described.get(key)))
        return unlike


EXACT = Level(
    HiddenCodec(Float32(), False),
    *(Float32(), Float32(), Float32(), Float32()),
    embedding=Float32(),
)
DEFAULT = Level(HiddenCodec(Int8()), Fixed(), Fixed(), Float16(), Square())
SMALL = Level(HiddenCodec(Int4(64)), Root(), Fixed(), Int8(DENSE), Coarse(), DENSE, Int4(64))
FIRST_SMALL = replace(SMALL, hidden=HiddenCodec(Int4(32)), attention=Square(DENSE))

LEVELS = {"exact": (EXACT,), "default": (DEFAULT,), "small": (SMALL, FIRST_SMALL)}
"""The forms of each level: the one that is written, then earlier ones."""
BUILT_IN = tuple(LEVELS)
"""The names of the levels of this software, from no error to most."""
GROUP = "teachonce.codecs"
"""Entry points of levels that other packages add: a `Level`, or a tuple of its forms."""


def forms_of(codec: object) -> tuple[Level, ...]:
    """The forms of a level, which an installed package may add.

    Raises StoreError for a name that nobody has, UserError if a package cannot be loaded.
    """
    if not isinstance(codec, str) or codec not in LEVELS:
        added = added_object(GROUP, codec) if isinstance(codec, str) else None
        if added is None:
            raise StoreError(
                f"features: codec must be one of {', '.join(LEVELS)}, got {codec!r}; if another"
                f" package adds it ({GROUP}), install that"
            )
        forms = added if isinstance(added, tuple) else (added,)
        if not all(isinstance(form, Level) for form in forms):
            raise StoreError(f"codec {codec}: expected a Level, got {type(added).__name__}")
        LEVELS[str(codec)] = forms
    return LEVELS[str(codec)]


def bound(
    level: Level, kind: str, values: Floats, stored: Mapping[str, Array] | None = None
) -> Array:
    """The largest error of each of `values` of a store that may have been recoded through every
    level before its own. See `Codec.bound`."""
    total: Array = getattr(level, kind).bound(values, stored)
    for name in BUILT_IN:
        if level in LEVELS[name]:
            break
        total = total + getattr(LEVELS[name][0], kind).bound(values)
    return total


def form_of(name: str, encodings: object, kinds: tuple[str, ...] = KINDS) -> int:
    """Which form of the level `name` a store with these `encodings` of `kinds` is of.

    Raises StoreError, naming a key, if no form would decode the store rightly.
    """
    if not isinstance(encodings, Mapping):
        raise StoreError(f"features: encodings must be a JSON object, got {encodings!r:.80}")
    unlike = [level.unlike(encodings, kinds) for level in forms_of(name)]
    nearest = min(range(len(unlike)), key=lambda form: len(unlike[form]))
    for key, expected, found in unlike[nearest]:
        raise StoreError(
            f"features: encodings.{key} of codec {name!r} is {json.dumps(found):.80}, expected"
            f" {json.dumps(expected)}; read the store with the software that wrote it"
        )
    return nearest
