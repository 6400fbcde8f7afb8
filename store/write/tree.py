"""Write the tree of a store: arrays outside its parts, a part, and the manifest that seals it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.interface import Sink, Staging, StoreSource
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Calibration, Features, check_name
from teachonce.store.format.index import FEW_PARTS, Write, write_index
from teachonce.store.format.layout import VERSIONS, Counts, part_arrays
from teachonce.store.format.manifest import (
    ATTRIBUTES,
    MAX_BYTES,
    Entry,
    Manifest,
    Part,
    length_dtype,
    read_entries,
    seal_checksum,
)
from teachonce.store.format.value_laws import calibration_problem
from teachonce.store.read.manifests import (
    listed_outside,
    missing_outside,
    part_numbers,
    published_parts,
    read_outside,
    unreadable_part,
)
from teachonce.store.read.part import PartReader
from teachonce.support.arrays import Array


class Extra(Protocol):
    """Defines an optional group of arrays outside the parts; see store/extras."""

    def arrays(self) -> dict[str, Array]:
        """Return the arrays to store, by path."""


class OutsideArguments(TypedDict, total=False):
    """Types the keyword arguments of `StoreWriter.create_or_resume`: fields of `OutsideParts`."""

    calibration: Calibration
    files: Mapping[str, bytes]
    weights: Mapping[str, Array] | Iterable[tuple[str, Array]]
    head: tuple[ArrayLike, ArrayLike] | None
    extras: tuple[Extra | None, ...]


@dataclass(frozen=True, eq=False)
class OutsideParts:
    """Holds the arrays of a store that belong to no part.

    calibration: mean and standard deviation [D] of each hidden state.
    files: files of the teacher, by name.
    weights: arrays of the teacher, by name, stored as float16.
    head: weight [V, D] and bias [V] of the LM head, for logits of tier `head`.
    extras: optional groups (`store/extras`).
    """

    calibration: Calibration = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    weights: Mapping[str, Array] | Iterable[tuple[str, Array]] = ()
    head: tuple[ArrayLike, ArrayLike] | None = None
    extras: tuple[Extra | None, ...] = ()

    def arrays(self, features: Features) -> Iterator[tuple[str, Array]]:
        """Yield (path, array) of each array, in the dtype in which it is stored.

        Raises StoreError for values that are not finite, and for shapes that do not fit `features`.
        """
        checked = _check_calibration(self.calibration, features)
        if (self.head is None) == bool(features.logits and features.logits.tier == "head"):
            raise StoreError("head (weight, bias) is needed for logits of tier head, and only then")
        for name, pair in checked.items():
            for key, array in zip(("mean", "deviation"), pair, strict=True):
                yield f"calibration/hidden/{name}/{key}", array
        for name, data in self.files.items():
            yield f"teacher/files/{name}", np.frombuffer(data, np.uint8)
        weights = self.weights
        for name, array in weights.items() if isinstance(weights, Mapping) else weights:
            yield f"teacher/weights/{name}", _half(f"teacher/weights/{name}", array)
        if self.head is not None:
            for key, values in zip(("weight", "bias"), self.head, strict=True):
                yield f"teacher/head/{key}", np.asarray(values, np.float32)
        for extra in self.extras:
            yield from extra.arrays().items() if extra else ()


def _half(name: str, array: Array) -> Array:
    """Round to float16. Raises StoreError for finite numbers that float16 cannot hold."""
    with np.errstate(over="ignore"):
        half = np.atleast_1d(array).astype(np.float16)
    far = np.isfinite(np.atleast_1d(array)) & ~np.isfinite(half)
    if far.any():
        value = float(np.atleast_1d(array)[far][0])
        raise StoreError(
            f"{name} has the value {value:.6g}, but a store has weights in float16, up to 65504;"
            " leave the weights out (teacher-dump --no-weights)"
        )
    return half


def _check_calibration(calibration: Calibration, features: Features) -> Calibration:
    checked = {}
    for name in features.hidden:
        if name not in calibration:
            raise StoreError(f"no calibration for hidden {name!r}: give (mean, deviation)")
        mean, deviation = (np.asarray(array, np.float32) for array in calibration[name])
        if mean.shape != (features.width,) or deviation.shape != (features.width,):
            raise StoreError(
                f"calibration of {name!r} has shapes {list(mean.shape)} and "
                f"{list(deviation.shape)}, expected [{features.width}] both"
            )
        if problem := calibration_problem(mean, deviation):
            raise StoreError(f"calibration of {name!r} {problem}")
        checked[name] = (mean, deviation)
    return checked


def create(
    staging: Staging, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]]
) -> None:
    """Write a new store without parts, and rename it to its path. Raises StoreError."""
    sink, entries = staging.create(), {}
    sink.attributes("parts", {})
    for name, values in arrays:
        # Names of weights come from a checkpoint and become folders of the store.
        for segment in name.split("/"):
            check_name(segment, f"array {name!r}: segment")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise StoreError(f"{name} has NaN or infinite values; the checkpoint is not usable")
        entries[name] = Entry.of(values, sink.array(name, values)).to_json()
    sink.attributes("", attributes | {"arrays": entries})
    sink.close()
    staging.begin()


def write_missing(
    staging: Staging, attributes: dict[str, Any], features: Features, outside: OutsideParts
) -> None:
    """Write the missing groups of an unfinished store, and its missing arrays outside the parts.

    Raises StoreError if a stored array is damaged, or if `outside` has a missing array with other
    values than before.
    """
    with closing(staging.source()) as source:
        entries = listed_outside(source)
        missing = missing_outside(source, entries)
        read = partial(read_outside, source, entries)
        # All stored arrays are checked before anything is written.
        for name in entries.keys() - missing:
            read(name)

        def same(name: str, values: Array) -> tuple[str, Array]:
            # Without fingerprints: another release of zarr may word zarr.json differently.
            if Entry.of(values, None) != entries[name]._replace(fingerprint=None):
                raise _other(source.path, name)
            return name, values

        def checked() -> Iterator[tuple[str, Array]]:
            pending = set(entries)
            # In the order in which a new store has them, as HDF5 lays arrays out as they are
            # written.
            for name, values in outside.arrays(features):
                if name in pending:
                    pending.remove(name)
                    yield same(name, values if name in missing else read(name))
            for name in sorted(pending):
                if name in missing:
                    raise _other(source.path, name)
                yield same(name, read(name))

        staging.complete(attributes, checked() if missing else (), missing)


def _other(path: str, name: str) -> StoreError:
    return StoreError(
        f"{path}: {name} is missing, and its values computed now differ from the earlier ones; use"
        " the same arguments, versions and machine, or restore the store from a copy, or remove it"
        " and repeat the command that made it"
    )


def write_part_tree(
    sink: Sink, features: Features, number: int, counts: Counts, arrays: Mapping[str, Array]
) -> None:
    """Write a whole part and its `part` attribute, and close the tree.

    Raises StoreError for an array whose shape or dtype differs from `part_arrays`.
    """
    entries = {}
    for name, spec in part_arrays(features, counts).items():
        values = arrays[name]
        if values.shape != spec.shape or values.dtype != spec.dtype:
            raise StoreError(
                f"part {number}: {name}: internal error: {values.dtype}{list(values.shape)}, "
                f"expected {spec.dtype}{list(spec.shape)}"
            )
        # The checksum is of the values in memory, so it reveals what encoding or the disk alters.
        entries[name] = Entry.of(values, sink.array(name, values, spec))
    sink.attributes("", {"part": Part(number, counts, entries).to_json()})
    sink.close()


def sealed_root(
    source: StoreSource,
    attributes: Mapping[str, Any],
    features: Features,
    write: Write,
) -> tuple[dict[str, Any], bytes]:
    """Make the root attributes and the manifest that seal a store with its published parts.

    With more than FEW_PARTS parts, the arrays of the index are passed to `write` one by one. Raises
    StoreError if a part has no readable entry.
    """
    parts = published_parts(source, features)
    pairs = ((part, _lengths(source, part, features)) for part in parts)
    return root_of_parts(attributes, features, pairs, len(part_numbers(source)), write)


def root_of_parts(
    attributes: Mapping[str, Any],
    features: Features,
    parts: Iterable[tuple[Part, Array]],
    count: int,
    write: Write,
) -> tuple[dict[str, Any], bytes]:
    """Make root attributes and manifest as `sealed_root` does, from `count` pairs of a part and the
    lengths of its sequences."""
    many = count > FEW_PARTS
    root = {**attributes, "state": "sealed", "version": VERSIONS[many]}
    entries = read_entries(attributes.get("arrays"), "")
    manifest = Manifest({key: root[key] for key in ATTRIBUTES}, entries, [])
    if many:
        data = manifest.to_bytes(write_index(parts, features, write))
    else:
        listed, lengths = zip(*parts, strict=True)
        data = replace(manifest, parts=listed, lengths=np.concatenate(lengths)).to_bytes()
        if len(data) > MAX_BYTES:  # readers need the rest, not the lengths
            data = replace(manifest, parts=listed).to_bytes()
    root["arrays"] = {name: entries[name].to_json() for name in sorted(entries)}
    return root | {"checksum": seal_checksum(data, root["created"])}, data


def _lengths(source: StoreSource, part: Part, features: Features) -> Array:
    try:
        return np.diff(PartReader(source, part, features).token_start).astype(
            length_dtype(features)
        )
    except StoreError as error:
        raise unreadable_part(source, part.number, error) from error
