"""Writes the arrays of a part into a tree under a temporary name."""

from __future__ import annotations

from collections.abc import Mapping

from teachonce.store.containers.interface import Sink
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.layout import ArraySpec, Counts, part_arrays
from teachonce.store.format.manifest import Entry, Part
from teachonce.support.arrays import Array


def write_arrays(
    sink: Sink,
    features: Features,
    number: int,
    counts: Counts,
    arrays: Mapping[str, Array],
    where: str,
) -> None:
    """Write a part whole, with the attribute that says what it holds, and close the tree.

    Raises StoreError for an array that is not as `part_arrays` has it.
    """
    entries = {}
    for name, spec in part_arrays(features, counts).items():
        values = _of_spec(arrays[name], spec, f"{where}: part {number}: {name}")
        entries[name] = Entry.of(values, sink.array(name, spec, values))
    sink.attributes("", {"part": Part(number, counts, entries).to_json()})
    sink.close()


def _of_spec(values: Array, spec: ArraySpec, where: str) -> Array:
    if values.shape != spec.shape or values.dtype != spec.dtype:
        raise StoreError(
            f"{where}: internal error: {values.dtype}{list(values.shape)}, "
            f"expected {spec.dtype}{list(spec.shape)}"
        )
    return values
