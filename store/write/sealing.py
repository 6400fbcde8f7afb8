"""Makes what finishes a store: its manifest, and the attributes of its root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from store.containers.interface import Source
from store.errors import StoreError
from store.format.features import Features
from store.format.index import FEW_PARTS, Write, write_index
from store.format.layout import VERSIONS
from store.format.manifest import (
    ATTRIBUTES,
    MAX_BYTES,
    Manifest,
    Part,
    length_dtype,
    read_entries,
    seal_checksum,
)
from store.read.part import PartReader
from store.read.unfinished import (
    part_numbers,
    published_parts,
    unreadable_part,
    unsealed_manifest,
)
from support.arrays import Array


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
    many = len(part_numbers(source)) > FEW_PARTS
    found = {**attributes, "state": "sealed", "version": VERSIONS[many]}
    data = (_with_index if many else _with_parts)(source, found, features, write)
    entries = read_entries(attributes.get("arrays"), source.path)
    found["arrays"] = {name: entries[name].to_json() for name in sorted(entries)}
    return found | {"checksum": seal_checksum(data, found["created"])}, data


def _with_parts(
    source: Source, attributes: Mapping[str, Any], features: Features, write: Write
) -> bytes:
    manifest = unsealed_manifest(source, attributes, features)
    lengths = [_lengths(source, part, features) for part in manifest.parts]
    data = replace(manifest, lengths=np.concatenate(lengths)).to_bytes()
    if len(data) > MAX_BYTES:  # readers do without the lengths, not without the rest
        data = manifest.to_bytes()
    return data


def _with_index(
    source: Source, attributes: Mapping[str, Any], features: Features, write: Write
) -> bytes:
    parts = published_parts(source, features)
    with_lengths = ((part, _lengths(source, part, features)) for part in parts)
    index = write_index(with_lengths, features, write)
    return Manifest(
        {key: attributes[key] for key in ATTRIBUTES},
        read_entries(attributes.get("arrays"), source.path),
        [],
    ).to_bytes(index)


def _lengths(source: Source, part: Part, features: Features) -> Array:
    try:
        return np.diff(PartReader(source, part, features).token_start).astype(
            length_dtype(features)
        )
    except StoreError as error:
        raise unreadable_part(source, part.number, error) from error
