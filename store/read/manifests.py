"""Read the manifest of a sealed store, the published parts of an unfinished store, and the arrays
outside the parts."""

from __future__ import annotations

import base64
import gc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from teachonce.store.containers.interface import StoreSource
from teachonce.store.containers.network import with_refetches
from teachonce.store.containers.paths import queue_of
from teachonce.store.errors import NO_NUMBERS, StoreError, command, without_remedy
from teachonce.store.format.features import Features
from teachonce.store.format.identity import making_command
from teachonce.store.format.index import IndexedParts
from teachonce.store.format.layout import Counts, PartShapes, part_numbers_in
from teachonce.store.format.manifest import (
    ATTRIBUTES,
    DAMAGED,
    MAX_BYTES,
    Entry,
    Manifest,
    Part,
    digest,
    length_dtype,
    read_entries,
    seal_checksum,
    suggest_repair,
)
from teachonce.store.format.value_laws import all_finite, calibration_problem
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted, takes_option


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Turn Python's garbage collector off inside the `with` block."""
    # Thousands of parts are a million objects, none of them garbage. The collector would take
    # longer to visit them again and again than it takes to create them.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class IndexedManifest(Manifest):
    """Holds a manifest of format version 2, whose parts are listed in an index."""

    parts: IndexedParts

    @cached_property
    def first(self) -> Array:
        return self.parts.first

    @cached_property
    def totals(self) -> Counts:
        return self.parts.totals

    @cached_property
    def numbers(self) -> Array:
        return self.parts.numbers

    def _checksums_of(self, indices: Array) -> Iterator[bytes]:
        return self.parts.checksums(indices)


def _read_lengths(value: object, features: Features, sequences: int, where: str) -> Array | None:
    if value is None:
        return None
    dtype = length_dtype(features)
    try:
        # Without `validate`, other characters are dropped in silence.
        data = base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where}: the manifest's lengths are not base64; {DAMAGED}") from error
    if len(data) != sequences * dtype.itemsize:
        raise StoreError(
            f"{where}: the manifest's lengths are {len(data):,} bytes, expected {sequences:,} x"
            f" {dtype.itemsize}; {DAMAGED}"
        )
    return np.frombuffer(data, dtype)


def sealed_manifest(
    source: StoreSource, attributes: Mapping[str, Any], features: Features
) -> tuple[Manifest, bytes]:
    """Read the manifest of a sealed store; return it with its stored bytes.

    Raises StoreError if it does not match the root attribute `checksum`.
    """
    where, stored = source.path, source.array("manifest")
    # Before it is read: parsing takes many times its bytes (FORMAT.md, section 3).
    if stored.dtype != np.uint8 or len(stored.shape) != 1 or stored.shape[0] > MAX_BYTES:
        raise StoreError(f"{where}: manifest is not a byte array; {DAMAGED}")
    data = stored.read(0, stored.shape[0]).tobytes()
    if seal_checksum(data, attributes["created"]) != attributes.get("checksum"):
        raise StoreError(f"{where}: the manifest does not match its checksum; {DAMAGED}")
    with garbage_collection_off():
        value = _parsed(data, attributes, where)
        arrays = read_entries(value.get("arrays"), where)
        if attributes["version"] > 1:
            read = partial(checked_array, source)
            parts = IndexedParts(value.get("parts"), features, where, read)
            return IndexedManifest(value["attributes"], arrays, parts, parts.lengths), data
        listed = _listed_parts(value.get("parts"), features, where)
        sequences = sum(part.counts.sequences for part in listed)
        lengths = _read_lengths(value.get("lengths"), features, sequences, where)
        return Manifest(value["attributes"], arrays, listed, lengths), data


def _parsed(data: bytes, attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    # RecursionError: nested brackets of a forged manifest.
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: the manifest is not JSON ({error}); {DAMAGED}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{where}: the manifest is not a JSON object; {DAMAGED}")
    # The checksum covers only the manifest, so the root's copy of each fact must equal it
    # (FORMAT.md, section 8).
    arrays = attributes.get("arrays", value.get("arrays"))  # optional in a sealed store
    if {key: attributes[key] for key in ATTRIBUTES} != value.get(
        "attributes"
    ) or arrays != value.get("arrays"):
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


def checked_array(source: StoreSource, name: str, entry: Entry) -> Array:
    """Read a whole array outside the parts. Raises StoreError if it does not match its entry."""
    # Bytes that a network altered look like damage, so they are fetched again before an error.
    return with_refetches(
        source.remote,
        lambda: _checked_array(source, name, entry),
        lambda: source.forget(name),
    )


def _checked_array(source: StoreSource, name: str, entry: Entry) -> Array:
    with suggest_repair():
        array = source.array(name)
    if array.shape != entry.shape or array.dtype.name != entry.dtype:
        raise StoreError(
            f"{source.path}: {name} is {array.dtype}{list(array.shape)}, the manifest has"
            f" {entry.dtype}{list(entry.shape)}; {DAMAGED}"
        )
    if entry.fingerprint and source.fingerprint(name) != entry.fingerprint:
        raise StoreError(f"{source.path}: {name} has an altered zarr.json; {DAMAGED}")
    with suggest_repair():
        values = array.read(0, array.shape[0])
    if digest(values) != entry.sha256:
        raise StoreError(f"{source.path}: {name} does not match its checksum; {DAMAGED}")
    return values


def manifest_of(
    source: StoreSource, attributes: Mapping[str, Any], parts: Sequence[Part]
) -> Manifest:
    """Make a manifest of parts from the root attributes of a store."""
    arrays = read_entries(attributes.get("arrays"), source.path)
    return Manifest({key: attributes[key] for key in ATTRIBUTES}, arrays, parts)


def unreadable_part(source: StoreSource, number: int, error: StoreError) -> StoreError:
    """Return the error for an unreadable part of an unfinished store."""
    return StoreError(
        f"{without_remedy(error)}; run {command('repair', source.path)}, which quarantines part"
        f" {number}, and run the command again: it writes this part again and continues"
    )


def own_entry(source: StoreSource, number: int, shapes: PartShapes) -> Part:
    """Read the entry that a part has in its own attributes. Raises StoreError."""
    value = source.attributes(f"parts/{number}").get("part")
    part = Part.from_json(value, shapes, source.path)
    if part.number != number:
        raise StoreError(f"{source.path}: part {number} has the attributes of part {part.number}")
    return part


def published_parts(
    source: StoreSource, features: Features, numbers: Iterable[int] | None = None
) -> Iterator[Part]:
    """Yield the parts of an unfinished store: the parts with these `numbers`, or all in ascending
    order.

    Raises StoreError if the entry of a part cannot be read.
    """
    shapes = PartShapes(features)
    for number in part_numbers(source) if numbers is None else numbers:
        try:
            part = own_entry(source, number, shapes)
        except StoreError as error:
            raise unreadable_part(source, number, error) from error
        yield part


def part_numbers(source: StoreSource) -> list[int]:
    """List the numbers of the parts of an unfinished store, ascending."""
    return sorted(part_numbers_in(source.members("parts")))


def unfinished_error(source: StoreSource) -> StoreError:
    """Return the error for an unfinished store: how many parts it has, and how to continue it."""
    numbers = part_numbers(source)
    # A single process writes the parts in order, so a gap in the numbers is a part that was lost.
    in_order = source.remote or not queue_of(source.address).exists()
    lost = numbers[-1] + 1 - len(numbers) if numbers and in_order else 0
    parts = counted(len(numbers), "part") + (f" published, {lost:,} missing" if lost else "")
    try:
        making = making_command(source.attributes().get("identity") or {})
    except StoreError:
        making = making_command({})
    ways = {True: "--allow-partial", None: "open_store(..., allow_partial=True)"}
    way = ways.get(takes_option("allow_partial"))
    return StoreError(
        f"{source.path}: is not finished ({parts}); wait until the command that writes it has"
        f" ended, or repeat that command ({making}) to write the rest"
        + (f"; or read the finished parts with {way}" if way else "")
    )


def listed_outside(source: StoreSource) -> dict[str, Entry]:
    """Return the entries of the arrays outside the parts of an unfinished store."""
    return read_entries(source.attributes().get("arrays"), source.path)


def missing_outside(source: StoreSource, listed: Mapping[str, Entry]) -> set[str]:
    """Return the names of `listed` arrays outside the parts that a store lacks.

    `feature-store repair` quarantined them, or they were lost.
    """
    # One listing for each group, instead of a request for each array.
    groups = {name.rpartition("/")[0] for name in listed}
    return listed.keys() - {f"{g}/{name}" for g in groups for name in source.members(g)}


def calibration_paths(name: str) -> tuple[str, str]:
    """Return the paths of the mean and the standard deviation of a hidden state."""
    return f"calibration/hidden/{name}/mean", f"calibration/hidden/{name}/deviation"


def read_outside(source: StoreSource, entries: Mapping[str, Entry], name: str) -> Array:
    """Read a whole array outside the parts. Raises StoreError if it has no entry, or does not match
    it."""
    if name not in entries:
        raise StoreError(f"{source.path}: has no {name}; {DAMAGED}")
    return checked_array(source, name, entries[name])


def check_finite(values: Array, subject: str) -> Array:
    """Return `values`, an array outside the parts. Raises StoreError for NaN and infinity."""
    if values.dtype.kind == "f" and not all_finite(values):
        raise StoreError(f"{subject} has NaN or infinite values; {NO_NUMBERS}")
    return values


def check_calibration(
    pair: tuple[Array, ...], features: Features, subject: str
) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of a hidden state.

    Raises StoreError unless both are float32 [D] and keep the laws of values.
    """
    mean, deviation = pair
    for array in pair:
        if array.shape != (features.width,) or array.dtype != np.float32:
            raise StoreError(
                f"{subject} is {array.dtype}{list(array.shape)}, expected"
                f" float32[{features.width}]; {DAMAGED}"
            )
    if problem := calibration_problem(mean, deviation):
        raise StoreError(f"{subject} {problem}; {NO_NUMBERS}")
    return mean, deviation
