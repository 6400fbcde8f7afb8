"""Makes what finishes a store: its manifest, and the attributes of its root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from store.containers.interface import Source
from store.errors import StoreError
from store.format.features import Features
from store.format.manifest import MAX_BYTES, Part, length_dtype, seal_checksum
from store.read.part import PartReader
from store.read.unfinished import unreadable_part, unsealed_manifest
from support.arrays import Array


def sealed_root(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> tuple[dict[str, Any], bytes]:
    """Make the root attributes and the manifest that finish a store as it is.

    Raises StoreError if a part does not say what it holds.
    """
    manifest = unsealed_manifest(source, attributes, features)
    lengths = [_lengths(source, part, features) for part in manifest.parts]
    data = replace(manifest, lengths=np.concatenate(lengths)).to_bytes()
    if len(data) > MAX_BYTES:  # readers do without the lengths, not without the rest
        data = manifest.to_bytes()
    entries = {name: manifest.arrays[name].to_json() for name in sorted(manifest.arrays)}
    found = {**attributes, "state": "sealed", "arrays": entries}
    return found | {"checksum": seal_checksum(data, found["created"])}, data


def _lengths(source: Source, part: Part, features: Features) -> Array:
    try:
        return np.diff(PartReader(source, part, features).token_start).astype(
            length_dtype(features)
        )
    except StoreError as error:
        raise unreadable_part(source, part.number, error) from error
