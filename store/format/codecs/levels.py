"""The registry of levels (`exact`, `default`, `small`): the codecs that a store uses."""

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
    LEAN,
    Codec,
    Elementwise,
    HiddenCodec,
    Packing,
)
from teachonce.support.arrays import Array, Floats
from teachonce.support.packages import added_object

KINDS = ("hidden", "logprobs", "rest", "head", "attention")
"""Kinds of arrays that every store has a codec for, even if it stores none of the kind."""


@dataclass(frozen=True)
class Level:
    """Lists the codecs of a store, by kind of array.

    `ids` compresses integer arrays of logits, `places` integer arrays of ranked logits.
    """

    hidden: HiddenCodec
    logprobs: Elementwise
    rest: Elementwise
    head: Codec
    attention: Elementwise
    ids: Packing = FAST
    embedding: Codec = Int8()
    places: Packing = FAST

    def encodings(self, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
        """Return the JSON that describes how arrays of these kinds are decoded."""
        return {kind: dict(getattr(self, kind).description) for kind in kinds}


EXACT = Level(
    HiddenCodec(Float32(), False),
    *(Float32(), Float32(), Float32(), Float32()),
    embedding=Float32(),
)
DEFAULT = Level(HiddenCodec(Int8()), Fixed(LEAN), Fixed(), Float16(), Square(), places=LEAN)
SMALL = Level(HiddenCodec(Int4(64)), Root(), Fixed(), Int8(DENSE), Coarse(), DENSE, Int4(64), DENSE)
# The older form of `small`: groups of 32 channels, which need twice the scales, and attention maps
# that use every code.
FIRST_SMALL = replace(SMALL, hidden=HiddenCodec(Int4(32)), attention=Square(DENSE))

LEVELS = {"exact": (EXACT,), "default": (DEFAULT,), "small": (SMALL, FIRST_SMALL)}
"""The forms of each level: the form that is written, then older forms, which are only read."""
BUILT_IN = tuple(LEVELS)
"""Names of the built-in levels, from no error to the largest."""
GROUP = "teachonce.codecs"
"""Entry-point group for levels of other packages: a `Level`, or a tuple of its forms."""


def forms_of(codec: object) -> tuple[Level, ...]:
    """Return the forms of a level, which is built in or added by an installed package. A form is
    one encoding of a level; stores written earlier may have an older one.

    Raises StoreError for an unknown name, UserError if the package cannot be loaded.
    """
    # The type comes first: a list in forged JSON has no hash, and `in` would raise TypeError.
    if not isinstance(codec, str) or codec not in LEVELS:
        added = added_object(GROUP, codec) if isinstance(codec, str) else None
        if added is None:
            raise StoreError(
                f"features: codec must be one of {', '.join(LEVELS)}, got {codec!r}; if another"
                f" package provides it (entry points {GROUP}), install that package"
            )
        forms = added if isinstance(added, tuple) else (added,)
        if not all(isinstance(form, Level) for form in forms):
            raise StoreError(f"codec {codec}: expected a Level, got {type(added).__name__}")
        # Searching all installed packages takes about 50 ms, and `Features.level` calls this often.
        LEVELS[str(codec)] = forms
    return LEVELS[str(codec)]


def bound(
    level: Level, kind: str, values: Floats, stored: Mapping[str, Array] | None = None
) -> Array:
    """Return an upper bound of the error of each of `values`, for the codec of `kind` in a level;
    see `Codec.bound`.

    Adds the errors of all less lossy built-in levels, because the store may have been converted
    from them.
    """
    total: Array = getattr(level, kind).bound(values, stored)
    # A level of another package is in none of these, so all built-in errors are added to its own.
    for name in BUILT_IN:
        if level in LEVELS[name]:
            break
        total = total + getattr(LEVELS[name][0], kind).bound(values)
    return total


def form_of(name: str, encodings: object, kinds: tuple[str, ...] = KINDS) -> int:
    """Return the form of the level `name` that decodes a store with these `encodings`.

    Raises StoreError, which names a key, if no form does.
    """
    if not isinstance(encodings, Mapping):
        raise StoreError(f"features: encodings must be a JSON object, got {encodings!r:.80}")
    forms, described = forms_of(name), dict[str, Mapping[str, Any]]()
    for kind in kinds:
        encoding = encodings.get(kind)
        described[kind] = encoding if isinstance(encoding, Mapping) else {}
    unlike = [
        [(kind, key) for kind in kinds for key in getattr(level, kind).unlike(described[kind])]
        for level in forms
    ]
    # The error names a key of the form that differs least.
    nearest = min(range(len(forms)), key=lambda form: len(unlike[form]))
    for kind, key in unlike[nearest]:
        actual, expected = (
            json.dumps(description.get(key))
            for description in (described[kind], getattr(forms[nearest], kind).description)
        )
        raise StoreError(
            f"features: encodings.{kind}.{key} of codec {name!r} is {actual:.80}, expected"
            f" {expected}; read the store with the software that wrote it"
        )
    return nearest
