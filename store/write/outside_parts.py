"""Write what a store holds outside its parts: all when it is begun, later what repair moved
aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.interface import Staging
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Calibration, Features, check_name
from teachonce.store.format.layout import teacher_array
from teachonce.store.format.manifest import Entry, read_entries
from teachonce.store.read.unfinished import absent_outside, read_outside
from teachonce.support.arrays import Array

Weights = Mapping[str, Array] | Iterable[tuple[str, Array]]


class Outside(Protocol):
    """An optional group of arrays outside the parts; see store/extras."""

    def arrays(self) -> dict[str, Array]:
        """The arrays to store, by path."""


def outside_arrays(
    features: Features,
    calibration: Calibration,
    files: Mapping[str, bytes],
    weights: Weights,
    head: tuple[ArrayLike, ArrayLike] | None,
    more: Iterable[Outside | None] = (),
) -> Iterator[tuple[str, Array]]:
    """Yield every array outside the parts by its path, as it is stored.

    Raises StoreError for values that are not finite or do not fit the features.
    """
    checked = _check_calibration(calibration, features)
    if (head is None) == bool(features.logits and features.logits.tier == "head"):
        raise StoreError("head (weight, bias) belongs to logits of tier head, and to no other")
    for name, pair in checked.items():
        for key, array in zip(("mean", "deviation"), pair, strict=True):
            yield f"calibration/hidden/{name}/{key}", array
    for name, data in files.items():
        yield f"teacher/files/{name}", np.frombuffer(data, np.uint8)
    for name, array in weights.items() if isinstance(weights, Mapping) else weights:
        with np.errstate(over="ignore"):  # not around the yield: nobody may ask again
            half = np.atleast_1d(array).astype(np.float16)
        yield f"teacher/weights/{name}", half
    if head is not None:
        for key, values in zip(("weight", "bias"), head, strict=True):
            yield f"teacher/head/{key}", np.asarray(values, np.float32)
    for other in more:
        yield from other.arrays().items() if other else ()


def begin(
    staging: Staging, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]]
) -> None:
    """Write what a new store holds outside its parts, and give it its name. Raises StoreError."""
    sink, entries = staging.create(), {}
    for name, values in arrays:
        for segment in name.split("/"):
            check_name(segment, f"array {name!r}: segment")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise StoreError(f"{name} has NaN or infinite values; the checkpoint is not usable")
        fingerprint = sink.array(name, teacher_array(values), values)
        entries[name] = Entry.of(values, fingerprint).to_json()
    sink.attributes("", attributes | {"arrays": entries})
    sink.close()
    staging.begin()


def complete(
    staging: Staging, attributes: dict[str, Any], arrays: Callable[[], Iterator[tuple[str, Array]]]
) -> None:
    """Write those arrays of an unfinished store that it lists and lacks, and the groups of Zarr.

    `arrays` gives all of them again. Raises StoreError if one that is there is damaged, or one that
    is lacking is not given with the values that it had.
    """
    with closing(staging.source()) as source:
        lacking, read = absent_outside(source), read_outside(source)
        entries = read_entries(attributes["arrays"], source.path)
        for name in entries.keys() - lacking:
            read(name)

        def made() -> Iterator[tuple[str, Array]]:
            left = set(entries)
            for name, values in arrays():
                if name in left:
                    left.remove(name)
                    yield name, values if name in lacking else read(name)
            for name in sorted(left - lacking):
                yield name, read(name)

        def checked() -> Iterator[tuple[str, Array]]:
            found = set()
            for name, values in made():
                if Entry.of(values, None) != entries[name]._replace(fingerprint=None):
                    raise _other(source.path, name)
                found.add(name)
                yield name, values
            for name in sorted(lacking - found):
                raise _other(source.path, name)

        staging.complete(attributes, checked() if lacking else (), lacking)


def _other(path: str, name: str) -> StoreError:
    return StoreError(
        f"{path}: {name} is lacking, and what is made now is not what it was: with the very same"
        " arguments, versions and machine it would be; else restore the store from a copy, or"
        " remove it and type the command that made it again"
    )


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
        finite = np.isfinite(mean).all() and np.isfinite(deviation).all()
        if not finite or not (deviation > 0).all():
            raise StoreError(f"calibration of {name!r} must be finite with deviations over 0")
        checked[name] = (mean, deviation)
    return checked
