"""The manifest: the parts with their counts, and a checksum of every array."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from teachonce.store.errors import NO_STORE, REPAIR, MissingStore, StoreError, without_remedy
from teachonce.store.format.features import Features, check_name
from teachonce.store.format.layout import FORMAT, MAX_PART, VERSIONS, Counts, PartShapes
from teachonce.support.arrays import Array, starts

MAX_BYTES = 2**29  # 10^5 parts with one view and one hidden state take about 2^28
SHA256 = re.compile("[0-9a-f]{64}").fullmatch
# Without re.ASCII, \d matches the digits of every script.
CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
ATTRIBUTES = ("format", "version", "identity", "features", "software")
DAMAGED = f"the store is damaged: {REPAIR}"


@contextmanager
def suggest_repair() -> Iterator[None]:
    """Replace the remedy of each StoreError in the `with` block by `feature-store repair`."""
    try:
        yield
    except StoreError as error:  # `feature-store verify` cannot open such a store either
        # A file that is not there, or may not be read, is not damaged, and `repair` could not read
        # it either.
        if isinstance(error, MissingStore) or isinstance(error.__cause__, PermissionError):
            raise
        raise StoreError(f"{without_remedy(error)}; {DAMAGED}") from error


class Entry(NamedTuple):
    """Holds shape, dtype and SHA-256 of an array.

    sha256: of the decoded, little-endian bytes in C order. fingerprint: the SHA-256 of the array's
        zarr.json, if known.
    """

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
    def from_json(value: object, where: str, name: str) -> Entry:
        """Check and read the entry of the array `name`. Raises StoreError if it is not valid."""
        if isinstance(value, dict):
            get = value.get
            shape, dtype, sha256 = get("shape"), get("dtype"), get("sha256")
            if isinstance(shape, list) and isinstance(dtype, str) and isinstance(sha256, str):
                # Few calls: this runs for each array of each part, 170,000 times
                # for 10,000 parts.
                for size in shape:
                    if type(size) is not int or size < 0:
                        break
                else:
                    printed = get("zarr_json")
                    of_metadata = printed is None or isinstance(printed, str) and SHA256(printed)
                    if SHA256(sha256) and of_metadata:
                        return Entry(tuple(shape), dtype, sha256, printed)
        raise StoreError(f"{where}: {name}: the manifest's entry is not valid; {DAMAGED}")


@dataclass(frozen=True)
class Part:
    """Holds a part of the manifest: number, counts, and the entries of its arrays by name."""

    number: int
    counts: Counts
    arrays: dict[str, Entry]

    def to_json(self) -> dict[str, Any]:
        arrays = {name: entry.to_json() for name, entry in self.arrays.items()}
        return {"part": self.number, "counts": self.counts.to_json(), "arrays": arrays}

    @staticmethod
    def from_json(value: object, shapes: PartShapes, where: str) -> Part:
        """Parse and check an entry of the manifest. Raises StoreError if it is not valid, or if its
        arrays do not match the features."""
        number = value.get("part") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or type(number) is not int:
            raise StoreError(f"{where}: a part of the manifest is not valid; {DAMAGED}")
        if not 0 <= number < MAX_PART:
            raise StoreError(f"{where}: part number {number} is out of range; {DAMAGED}")
        here = f"{where}: part {number}"
        counts = Counts.from_json(value.get("counts"), shapes.features, here)
        expected, listed = shapes.of(counts), value.get("arrays")
        if not isinstance(listed, Mapping) or listed.keys() != expected.keys():
            raise StoreError(f"{here}: its arrays do not match the store's features; {DAMAGED}")
        arrays = {}
        for name, (shape, dtype) in expected.items():
            entry = Entry.from_json(listed[name], here, name)
            if entry.shape != shape or entry.dtype != dtype:
                raise StoreError(
                    f"{here}: {name} is {entry.dtype}{list(entry.shape)}, "
                    f"expected {dtype}{list(shape)}; {DAMAGED}"
                )
            arrays[name] = entry
        return Part(number, counts, arrays)


@dataclass(frozen=True)
class Manifest:
    """Holds the manifest of a store.

    arrays: entries of the arrays outside the parts.
    parts: in order; a list, or `IndexedParts`.
    lengths: tokens of each of the n sequences, of `length_dtype`: an array, or `IndexedLengths`,
        which returns slices as arrays. None in unfinished stores, and in stores that were written
        before lengths were stored.
    """

    attributes: dict[str, Any]
    arrays: dict[str, Entry]
    parts: Sequence[Part]
    # Not compared: == of arrays has no single truth value. The checksums of the parts imply the
    # lengths.
    lengths: Any = field(default=None, compare=False)

    @cached_property
    def first(self) -> Array:
        """Return int64 [parts + 1], the first sequence of each part, then the number of all
        sequences."""
        return starts(np.array([part.counts.sequences for part in self.parts], int))

    @cached_property
    def totals(self) -> Counts:
        """Return the sums of all parts' counts."""
        none = np.zeros(4 + 2 * self.attributes["features"]["views"], np.int64)
        return Counts.of_flat(sum((np.array(p.counts.flat()) for p in self.parts), none).tolist())

    @cached_property
    def numbers(self) -> Array:
        """Return int64 [parts], the numbers of the parts."""
        return np.array([part.number for part in self.parts], np.int64)

    def content(self) -> str:
        """Return the SHA-256 over the checksums of all arrays.

        It is the same for stores of equal values, whether Zarr or HDF5, of version 1 or 2.
        """
        return self._content

    @cached_property
    def text_key(self) -> str:
        """Return the first 32 hexadecimal digits of the SHA-256 over the stored checksums of all
        parts' texts and text boundaries, in order."""
        digest = hashlib.sha256()
        for part in self.parts:
            # The boundaries count, too: the same bytes can be divided into other texts.
            for name in ("text/utf8", "sequence/text_start"):
                digest.update(part.arrays[name].sha256.encode())
        return digest.hexdigest()[:32]

    @cached_property
    def _content(self) -> str:
        # The hashed JSON object is made piece by piece: for a million parts it has gigabytes.
        hasher, separator = hashlib.sha256(b"{"), b""
        for lines in self._checksums():
            hasher.update(separator + lines)
            separator = b", "
        hasher.update(b"}")
        return hasher.hexdigest()

    def _checksums(self) -> Iterator[bytes]:
        """Yield pieces of the JSON entries `"path": "checksum"` of all arrays, sorted by path; no
        piece is empty."""
        names = sorted(self.arrays)
        middle = bisect(names, "parts/")
        if middle:
            yield _lines("", self.arrays, names[:middle])
        # Sorted as text, as the keys of the hashed JSON are: part 10 comes before part 2.
        yield from self._checksums_of(np.argsort(self.numbers.astype("S"), kind="stable"))
        if middle < len(names):
            yield _lines("", self.arrays, names[middle:])

    def _checksums_of(self, indices: Array) -> Iterator[bytes]:
        """Yield the JSON of all arrays of the parts with these indices, in this order."""
        for part in map(self.parts.__getitem__, indices.tolist()):
            yield _lines(f"parts/{part.number}/", part.arrays, sorted(part.arrays))

    def to_bytes(self, index: dict[str, Any] | None = None) -> bytes:
        """Return the manifest as it is stored. `index`, if given, is written in place of the list
        of parts."""
        # Sorted: the manifest must not depend on the order in which parts were published.
        in_order = sorted(self.parts, key=lambda p: p.number)
        value: dict[str, Any] = {
            "attributes": {key: self.attributes[key] for key in ATTRIBUTES},
            "arrays": {name: self.arrays[name].to_json() for name in sorted(self.arrays)},
            "parts": [part.to_json() for part in in_order] if index is None else index,
        }
        if self.lengths is not None:
            value["lengths"] = base64.b64encode(self.lengths[:].tobytes()).decode("ascii")
        # One form of JSON, because equal stores have equal bytes (FORMAT.md, section 9).
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _lines(folder: str, entries: Mapping[str, Entry], names: Sequence[str]) -> bytes:
    # No name has a character that JSON escapes (see `check_name`).
    lines = (f'"{folder}{name}": "{entries[name].sha256}"' for name in names)
    return ", ".join(lines).encode("ascii")


def digest(values: Array) -> str:
    """Return the hexadecimal SHA-256 of an array's little-endian bytes in C order."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return hashlib.sha256(little.data if little.size else b"").hexdigest()


def seal_checksum(manifest: bytes, created: str) -> str:
    """Return the root attribute `checksum`: the SHA-256 of the manifest followed by `created`."""
    # `created` is not in the manifest, so that equal dumps have equal manifests.
    return hashlib.sha256(manifest + created.encode()).hexdigest()


def length_dtype(features: Features) -> np.dtype[Any]:
    """Return the smallest of uint8, uint16 and uint32, little-endian, that holds `max_length`."""
    return np.min_scalar_type(features.max_length).newbyteorder("<")


def check_root(attributes: Mapping[str, Any], where: str) -> Features:
    """Check the root attributes of a finished or unfinished store; return its features.

    Raises StoreError.
    """
    if attributes.get("format") != FORMAT:
        raise StoreError(
            f"{where}: not a feature store (no attribute format={FORMAT!r}); {NO_STORE}"
        )
    # Before the other attributes, which another version may define differently.
    version = attributes.get("version")
    # `type`: true equals 1.
    if type(version) is not int or version not in VERSIONS:
        versions = " and ".join(map(str, VERSIONS))
        raise StoreError(
            f"{where}: format version {version!r}; this software reads versions {versions}: "
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
    """Check and read the entries of the arrays outside the parts.

    Raises StoreError for a name that is not a path of plain names under `teacher` or `calibration`.
    """
    if not isinstance(value, Mapping):
        raise StoreError(f"{where}: the list of arrays is not a JSON object; {DAMAGED}")
    for name in value:
        segments = str(name).split("/")
        if segments[0] not in ("teacher", "calibration") or not 2 < len(segments) < 5:
            raise StoreError(f"{where}: array {name!r} does not belong in a store; {DAMAGED}")
        for segment in segments:
            # Names become paths, and a segment like `..` would lead out of the store.
            check_name(segment, f"{where}: array {name!r}: segment")
    return {name: Entry.from_json(entry, where, name) for name, entry in value.items()}
