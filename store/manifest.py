"""The manifest: parts with their counts, and a checksum of every array and of itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from store.console import counted
from store.errors import RESTORE, StoreError, without_remedy
from store.features import Features, check_name
from store.layout import FORMAT, MAX_PART, VERSION, Counts, part_arrays
from store.tree import Array, Source

MAX_BYTES = 2**29  # 10^5 parts of a view with one hidden state have some 2^28
CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
ATTRIBUTES = ("format", "version", "identity", "features", "software")
DAMAGED = f"the store is damaged: {RESTORE}"


@contextmanager
def opening() -> Iterator[None]:
    """What cannot be read here keeps `feature-store verify` from opening the store, too."""
    try:
        yield
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        raise StoreError(f"{without_remedy(error)}; {DAMAGED}") from error


@dataclass(frozen=True)
class Entry:
    """Shape, dtype and SHA-256 (of the decoded little-endian bytes in C order) of an array."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    fingerprint: str | None = None

    @staticmethod
    def of(values: Array, fingerprint: str | None) -> Entry:
        return Entry(values.shape, values.dtype.name, digest(values), fingerprint)

    def to_json(self) -> dict[str, Any]:
        entry = {"shape": list(self.shape), "dtype": self.dtype, "sha256": self.sha256}
        return entry | ({"zarr_json": self.fingerprint} if self.fingerprint else {})

    @staticmethod
    def from_json(value: object, where: str) -> Entry:
        """Check and read an entry. Raises StoreError naming `where`."""
        if isinstance(value, Mapping):
            shape, dtype, sha256 = (value.get(key) for key in ("shape", "dtype", "sha256"))
            whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
            if whole and isinstance(dtype, str) and isinstance(sha256, str) and shape is not None:
                return Entry(tuple(shape), dtype, sha256, value.get("zarr_json"))
        raise StoreError(f"{where}: the manifest's entry is not valid; {DAMAGED}")


@dataclass(frozen=True)
class Part:
    """A part as the manifest knows it."""

    number: int
    counts: Counts
    arrays: dict[str, Entry]

    def to_json(self) -> dict[str, Any]:
        arrays = {name: entry.to_json() for name, entry in self.arrays.items()}
        return {"part": self.number, "counts": self.counts.to_json(), "arrays": arrays}

    @staticmethod
    def from_json(value: object, features: Features, where: str) -> Part:
        """Check and read a part. Raises StoreError if its arrays are not those of `features`."""
        number = value.get("part") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or type(number) is not int:
            raise StoreError(f"{where}: a part of the manifest is not valid; {DAMAGED}")
        if not 0 <= number < MAX_PART:
            raise StoreError(f"{where}: part number {number} is out of range; {DAMAGED}")
        here = f"{where}: part {number}"
        counts = Counts.from_json(value.get("counts"), features, here)
        specs, listed = part_arrays(features, counts), value.get("arrays")
        if not isinstance(listed, Mapping) or set(listed) != set(specs):
            raise StoreError(f"{here}: its arrays are not those of the store's features; {DAMAGED}")
        arrays = {}
        for name, spec in specs.items():
            entry = Entry.from_json(listed[name], f"{here}: {name}")
            if entry.shape != spec.shape or entry.dtype != spec.dtype.name:
                raise StoreError(
                    f"{here}: {name} is {entry.dtype}{list(entry.shape)}, "
                    f"expected {spec.dtype.name}{list(spec.shape)}; {DAMAGED}"
                )
            arrays[name] = entry
        return Part(number, counts, arrays)


@dataclass(frozen=True)
class Manifest:
    """`arrays` are those outside the parts: teacher/... and calibration/..."""

    attributes: dict[str, Any]
    arrays: dict[str, Entry]
    parts: list[Part]

    def content(self) -> str:
        """SHA-256 over the checksums of all arrays: the same in Zarr and HDF5, and for every dump
        of equal values."""
        digests = {name: entry.sha256 for name, entry in self.arrays.items()}
        for part in self.parts:
            for name, entry in part.arrays.items():
                digests[f"parts/{part.number}/{name}"] = entry.sha256
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode("ascii")).hexdigest()

    def to_bytes(self) -> bytes:
        value = {
            "attributes": {key: self.attributes[key] for key in ATTRIBUTES},
            "arrays": {name: self.arrays[name].to_json() for name in sorted(self.arrays)},
            "parts": [part.to_json() for part in sorted(self.parts, key=lambda p: p.number)],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def digest(values: Array) -> str:
    """SHA-256 of an array's little-endian bytes in C order, as hex."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return hashlib.sha256(little.data if little.size else b"").hexdigest()


def seal_checksum(manifest: bytes, created: str) -> str:
    """The root attribute `checksum`: covers the manifest, and `created`, which it leaves out."""
    return hashlib.sha256(manifest + created.encode()).hexdigest()


def check_root(attributes: Mapping[str, Any], where: str) -> Features:
    """Check the root attributes of a store of any state. Raises StoreError."""
    if attributes.get("format") != FORMAT:
        raise StoreError(
            f"{where}: not a feature store (no attribute format={FORMAT!r}); "
            "give the .zarr folder or .h5 file that teacher-dump wrote"
        )
    version = attributes.get("version")
    if type(version) is not int or version != VERSION:
        raise StoreError(
            f"{where}: format version {version!r}; this software reads version {VERSION}: "
            "use the version that wrote it, or dump again"
        )
    for key in ("identity", "software"):
        if not isinstance(attributes.get(key), Mapping):
            raise StoreError(f"{where}: attribute {key} is not a JSON object; {DAMAGED}")
    if attributes.get("state") not in ("writing", "sealed"):
        raise StoreError(f"{where}: state is {attributes.get('state')!r}; {DAMAGED}")
    if not CREATED.fullmatch(str(attributes.get("created"))):
        raise StoreError(f"{where}: attribute created is not a time in UTC; {DAMAGED}")
    try:
        return Features.from_json(attributes.get("features"))
    except StoreError as error:
        raise StoreError(f"{where}: {error}") from error


def read_entries(value: object, where: str) -> dict[str, Entry]:
    """Check the entries of the arrays outside the parts; their names must be harmless paths."""
    if not isinstance(value, Mapping):
        raise StoreError(f"{where}: the list of arrays is not a JSON object; {DAMAGED}")
    for name in value:
        segments = str(name).split("/")
        if segments[0] not in ("teacher", "calibration") or not 2 < len(segments) < 5:
            raise StoreError(f"{where}: array {name!r} does not belong in a store; {DAMAGED}")
        for segment in segments:
            check_name(segment, f"{where}: array {name!r}: segment")
    return {name: Entry.from_json(entry, f"{where}: {name}") for name, entry in value.items()}


def read_manifest(source: Source, attributes: Mapping[str, Any], features: Features) -> Manifest:
    """Read and check the manifest of a sealed store. Raises StoreError if it does not match."""
    stored = source.array("manifest")
    if stored.dtype != np.uint8 or len(stored.shape) != 1 or stored.shape[0] > MAX_BYTES:
        raise StoreError(f"{source.path}: manifest is not a byte array; {DAMAGED}")
    data = stored.read(0, stored.shape[0]).tobytes()
    if seal_checksum(data, attributes["created"]) != attributes.get("checksum"):
        raise StoreError(f"{source.path}: the manifest does not match its checksum; {DAMAGED}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{source.path}: the manifest is not JSON ({error}); {DAMAGED}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{source.path}: the manifest is not a JSON object; {DAMAGED}")
    known = attributes.get("arrays", value.get("arrays"))  # not in every store
    if {key: attributes[key] for key in ATTRIBUTES} != value.get(
        "attributes"
    ) or known != value.get("arrays"):
        raise StoreError(f"{source.path}: the root attributes were altered; {DAMAGED}")
    if not isinstance(value.get("parts"), list):
        raise StoreError(f"{source.path}: the manifest has no list of parts; {DAMAGED}")
    parts = [Part.from_json(part, features, source.path) for part in value["parts"]]
    numbers = [part.number for part in parts]
    if numbers != sorted(set(numbers)):
        raise StoreError(f"{source.path}: the manifest's parts are not in order; {DAMAGED}")
    return Manifest(value["attributes"], read_entries(value.get("arrays"), source.path), parts)


def _place(path: str, part: int) -> str:
    """Where a part of an unfinished store lies."""
    return f"{path}.parts/{part}.h5" if path.endswith(".h5") else f"{path}/parts/{part}"


def unsealed_manifest(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> Manifest:
    """What an unfinished store has so far: its published parts."""
    manifest, unreadable = readable_manifest(source, attributes, features)
    for number, error in unreadable.items():
        raise _unreadable(source, number, error) from error
    return manifest


def _unreadable(source: Source, number: int, error: StoreError) -> StoreError:
    return StoreError(
        f"{without_remedy(error)}; remove {_place(source.path, number)} and type the "
        "teacher-dump command again: it writes this part anew and goes on"
    )


def _own_entry(source: Source, number: int, features: Features) -> Part:
    value = source.attributes(f"parts/{number}").get("part")
    part = Part.from_json(value, features, source.path)
    if part.number != number:
        raise StoreError(f"{source.path}: part {number} says it is part {part.number}")
    return part


def published_part(source: Source, number: int, features: Features) -> Part:
    """A part of an unfinished store, by the entry that it holds itself."""
    try:
        return _own_entry(source, number, features)
    except StoreError as error:
        raise _unreadable(source, number, error) from error


def part_numbers(source: Source) -> list[int]:
    """Numbers of the parts of an unfinished store, ascending."""
    return sorted(int(name) for name in source.members("parts") if name.isdecimal())


def unfinished(source: Source) -> StoreError:
    """Why an unfinished store is refused.

    Parts are written in order, so one that is missing before another was there and is gone.
    """
    there = part_numbers(source)
    gone = there[-1] + 1 - len(there) if there else 0
    parts = counted(len(there), "part") + (f" there, {gone:,} dropped or lost" if gone else "")
    return StoreError(
        f"{source.path}: is not finished ({parts}); let the command that makes it end, or type it"
        " again (teacher-dump with the same arguments), which makes the rest; or take the parts"
        " that are there with --allow-partial, open_store(..., allow_partial=True)"
    )


def readable_manifest(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> tuple[Manifest, dict[int, StoreError]]:
    """The manifest made of the entries that parts hold themselves, and what is wrong with the parts
    whose entries cannot be read."""
    parts, unreadable = [], {}
    for number in part_numbers(source):
        try:
            parts.append(_own_entry(source, number, features))
        except StoreError as error:
            unreadable[number] = error
    arrays = read_entries(attributes.get("arrays"), source.path)
    kept = {key: attributes[key] for key in ATTRIBUTES}
    return Manifest(kept, arrays, parts), unreadable
