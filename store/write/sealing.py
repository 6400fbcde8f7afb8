"""Makes what finishes a store: its manifest, and the attributes of its root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from teachonce.store.containers.interface import Source
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.index import FEW_PARTS, Write, write_index
from teachonce.store.format.layout import VERSIONS
from teachonce.store.format.manifest import (
    ATTRIBUTES,
    MAX_BYTES,
    Manifest,
    Part,
    length_dtype,
    read_entries,
    seal_checksum,
)
from teachonce.store.read.part import PartReader
from teachonce.store.read.unfinished import part_numbers, published_parts, unreadable_part
from teachonce.support.arrays import Array


def sealed_root(
    source: Source,
    attributes: Mapping[str, Any],
    features: Features,
    write: Write = lambda name, values: None,
) -> tuple[dict[str, Any], bytes]:
    """Make the root attributes and the manifest that finish a store as it is.

    The arrays of the index, if it has so many parts, are given to `write`, some at a time. Raises
    StoreError if a part does not say what it holds.
    """
    parts = published_parts(source, features)
    pairs = ((part, _lengths(source, part, features)) for part in parts)
    return root_of(attributes, features, pairs, len(part_numbers(source)), write)


def root_of(
    attributes: Mapping[str, Any],
    features: Features,
    parts: Iterable[tuple[Part, Array]],
    count: int,
    write: Write,
) -> tuple[dict[str, Any], bytes]:
    """Do as `sealed_root`, of so many parts with the lengths of their sequences."""
    many = count > FEW_PARTS
    found = {**attributes, "state": "sealed", "version": VERSIONS[many]}
    entries = read_entries(attributes.get("arrays"), "")
    manifest = Manifest({key: found[key] for key in ATTRIBUTES}, entries, [])
    if many:
        data = manifest.to_bytes(write_index(parts, features, write))
    else:
        listed, lengths = zip(*parts, strict=True)
        data = replace(manifest, parts=listed, lengths=np.concatenate(lengths)).to_bytes()
        if len(data) > MAX_BYTES:  # readers do without the lengths, not without the rest
            data = replace(manifest, parts=listed).to_bytes()
    found["arrays"] = {name: entries[name].to_json() for name in sorted(entries)}
    return found | {"checksum": seal_checksum(data, found["created"])}, data


def _lengths(source: Source, part: Part, features: Features) -> Array:
    try:
        return np.diff(PartReader(source, part, features).token_start).astype(
            length_dtype(features)
        )
    except StoreError as error:
        raise unreadable_part(source, part.number, error) from error
