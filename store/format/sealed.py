"""Read the manifest of a sealed store, which tells of its parts itself or by an index."""

from __future__ import annotations

import base64
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.index import IndexedParts, Read
from teachonce.store.format.layout import Counts, PartShapes
from teachonce.store.format.manifest import (
    ATTRIBUTES,
    DAMAGED,
    Manifest,
    Part,
    length_dtype,
    read_entries,
    seal_checksum,
)
from teachonce.support.arrays import Array


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector meanwhile.

    Thousands of parts are a million objects, none of them garbage. To look through them again and
    again takes the collector longer than it takes to make them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class IndexedManifest(Manifest):
    """A manifest whose parts an index tells."""

    parts: IndexedParts

    @cached_property
    def first(self) -> Array:
        return self.parts.first

    @cached_property
    def totals(self) -> Counts:
        return self.parts.totals

    @cached_property
    def numbers(self) -> Array:
        return self.parts.numbers()


def _read_lengths(value: object, features: Features, sequences: int, where: str) -> Array | None:
    if value is None:
        return None
    dtype = length_dtype(features)
    try:
        data = base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where}: the manifest's lengths are not base64; {DAMAGED}") from error
    if len(data) != sequences * dtype.itemsize:
        raise StoreError(
            f"{where}: the manifest's lengths are {len(data):,} bytes, expected {sequences:,} x"
            f" {dtype.itemsize}; {DAMAGED}"
        )
    return np.frombuffer(data, dtype)


def read_manifest(
    data: bytes, attributes: Mapping[str, Any], features: Features, where: str, read: Read
) -> Manifest:
    """Check and read the manifest of a sealed store. Raises StoreError if it does not match.

    `read` gives the values of an array of the index that agree with an entry.
    """
    if seal_checksum(data, attributes["created"]) != attributes.get("checksum"):
        raise StoreError(f"{where}: the manifest does not match its checksum; {DAMAGED}")
    with uncollected():
        value = _parsed(data, attributes, where)
        arrays = read_entries(value.get("arrays"), where)
        if attributes["version"] > 1:
            parts = IndexedParts(value.get("parts"), features, where, read)
            return IndexedManifest(value["attributes"], arrays, parts, parts.lengths)
        listed = _listed_parts(value.get("parts"), features, where)
        sequences = sum(part.counts.sequences for part in listed)
        lengths = _read_lengths(value.get("lengths"), features, sequences, where)
        return Manifest(value["attributes"], arrays, listed, lengths)


def _parsed(data: bytes, attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: the manifest is not JSON ({error}); {DAMAGED}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{where}: the manifest is not a JSON object; {DAMAGED}")
    known = attributes.get("arrays", value.get("arrays"))  # not in every store
    if {key: attributes[key] for key in ATTRIBUTES} != value.get(
        "attributes"
    ) or known != value.get("arrays"):
        raise StoreError(f"{where}: the root attributes were altered; {DAMAGED}")
    return value


def _listed_parts(value: object, features: Features, where: str) -> list[Part]:
    if not isinstance(value, list):
        raise StoreError(f"{where}: the manifest has no list of parts; {DAMAGED}")
    shapes = PartShapes(features)
    parts = [Part.from_json(part, shapes, where) for part in value]
    numbers = [part.number for part in parts]
    if numbers != sorted(set(numbers)):
        raise StoreError(f"{where}: the manifest's parts are not in order; {DAMAGED}")
    return parts
