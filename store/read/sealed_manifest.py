"""Read what stands outside the parts of a sealed store: its manifest, and arrays by their
entries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from teachonce.store.containers.interface import Source
from teachonce.store.containers.network import surely
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.manifest import DAMAGED, MAX_BYTES, Entry, Manifest, digest, opening
from teachonce.store.format.sealed import read_manifest
from teachonce.support.arrays import Array


def sealed_manifest(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> tuple[Manifest, bytes]:
    """Read the manifest, and its stored bytes. Raises StoreError."""
    data = manifest_bytes(source)
    read = partial(checked_array, source)
    return read_manifest(data, attributes, features, source.path, read), data


def manifest_bytes(source: Source) -> bytes:
    """Read the manifest of a sealed store. Raises StoreError."""
    stored = source.array("manifest")
    if stored.dtype != np.uint8 or len(stored.shape) != 1 or stored.shape[0] > MAX_BYTES:
        raise StoreError(f"{source.path}: manifest is not a byte array; {DAMAGED}")
    return stored.read(0, stored.shape[0]).tobytes()


def checked_array(source: Source, name: str, entry: Entry) -> Array:
    """Read a whole array outside the parts. Raises StoreError if it is not what its entry says."""

    def read() -> Array:
        try:
            return _checked_array(source, name, entry)
        except StoreError:
            source.forget(name)
            raise

    return surely(source.remote, read)


def _checked_array(source: Source, name: str, entry: Entry) -> Array:
    with opening():
        array = source.array(name)
    if array.shape != entry.shape or array.dtype.name != entry.dtype:
        raise StoreError(f"{source.path}: {name} is not what the manifest says; {DAMAGED}")
    if entry.fingerprint and source.fingerprint(name) != entry.fingerprint:
        raise StoreError(f"{source.path}: {name} has an altered zarr.json; {DAMAGED}")
    with opening():
        values = array.read(0, array.shape[0])
    if digest(values) != entry.sha256:
        raise StoreError(f"{source.path}: {name} does not match its checksum; {DAMAGED}")
    return values
