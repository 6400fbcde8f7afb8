"""Begin a store: check and write what it holds outside its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from store.containers.interface import Sink, Staging
from store.errors import StoreError
from store.format.features import Calibration, Features, check_name
from store.format.layout import teacher_array
from store.format.manifest import Entry
from support.arrays import Array

Weights = Mapping[str, Array] | Iterable[tuple[str, Array]]


class Outside(Protocol):
    """An optional group of arrays outside the parts; see store/extras."""

    def arrays(self) -> dict[str, Array]:
        """The arrays to store, by path."""


def begin(
    staging: Staging,
    attributes: dict[str, Any],
    calibration: Calibration,
    files: Mapping[str, bytes],
    weights: Weights,
    head: tuple[ArrayLike, ArrayLike] | None,
    more: Iterable[Outside | None] = (),
) -> None:
    """Write what a new store holds outside its parts, and give it its name.

    Raises StoreError for values that are not finite or do not fit the features.
    """
    features = Features.from_json(attributes["features"])
    checked = _check_calibration(calibration, features)
    if (head is None) == bool(features.logits and features.logits.tier == "head"):
        raise StoreError("head (weight, bias) belongs to logits of tier head, and to no other")
    recorder = _Recorder(staging.create())
    for name, pair in checked.items():
        for key, array in zip(("mean", "deviation"), pair, strict=True):
            recorder.put(f"calibration/hidden/{name}/{key}", array)
    for name, data in files.items():
        recorder.put(f"teacher/files/{name}", np.frombuffer(data, np.uint8))
    for name, array in weights.items() if isinstance(weights, Mapping) else weights:
        with np.errstate(over="ignore"):
            recorder.put(f"teacher/weights/{name}", np.atleast_1d(array).astype(np.float16))
    if head is not None:
        for key, values in zip(("weight", "bias"), head, strict=True):
            recorder.put(f"teacher/head/{key}", np.asarray(values, np.float32))
    for other in more:
        for name, array in other.arrays().items() if other else ():
            recorder.put(name, array)
    recorder.sink.attributes("", attributes | {"arrays": recorder.entries})
    recorder.sink.close()
    staging.begin()


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


class _Recorder:
    """Writes the arrays outside the parts and keeps their manifest entries."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.entries: dict[str, Any] = {}

    def put(self, name: str, values: Array) -> None:
        for segment in name.split("/"):
            check_name(segment, f"array {name!r}: segment")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise StoreError(f"{name} has NaN or infinite values; the checkpoint is not usable")
        fingerprint = self.sink.array(name, teacher_array(values), values)
        self.entries[name] = Entry.of(values, fingerprint).to_json()
