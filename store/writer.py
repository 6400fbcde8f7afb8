"""Writing a store: create or resume, part by part, then seal. One process writes a store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from store.errors import StoreError, UserError
from store.features import Features, check_name
from store.hdf5_staging import Hdf5Staging
from store.layout import FORMAT, MAX_PART, VERSION, ArraySpec, Counts, part_arrays, teacher_array
from store.manifest import Entry, Part, check_root, seal_checksum, unsealed_manifest
from store.part_writer import Calibration, PartWriter
from store.tree import Array, Sink, Staging
from store.zarr_staging import ZarrStaging

Weights = Mapping[str, Array] | Iterable[tuple[str, Array]]


def staging_of(path: str | Path) -> Staging:
    """How a store with this name is written. UserError unless it ends in .zarr or .h5."""
    target = Path(path)
    if "://" in str(path):
        raise UserError(f"{path}: stores are written to a local path; upload the finished folder")
    if target.suffix == ".zarr":
        return ZarrStaging(target)
    if target.suffix == ".h5":
        return Hdf5Staging(target)
    raise UserError(f"{path}: the name of a store must end in .zarr (Zarr v3) or .h5 (HDF5)")


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py tells a full disk as RuntimeError
        raise StoreError(
            f"cannot write {what} ({error}); published parts are kept: "
            "make room and start again with the same arguments"
        ) from error


def _differences(old: Any, new: Any, key: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(set(old) | set(new)):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif old != new:
        yield f"{key} is {str(old)[:80]!r} in the store and {str(new)[:80]!r} now"


def _json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        decoded: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be written as JSON ({error})") from error
    return decoded


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


class StoreWriter:
    """A store being written. `create_or_resume` makes one."""

    def __init__(self, staging: Staging, attributes: dict[str, Any]) -> None:
        self._staging, self._attributes = staging, attributes
        self.path = staging.path
        self.features = check_root(attributes, str(self.path))
        staging.lock()
        self._calibration = StoreWriter.calibration(self.path)
        self.published: set[int] = staging.published()

    @staticmethod
    def create_or_resume(
        path: str | Path,
        identity: Mapping[str, Any],
        features: Features,
        calibration: Calibration,
        files: Mapping[str, bytes] | None = None,
        weights: Weights | None = None,
        head: tuple[ArrayLike, ArrayLike] | None = None,
        software: Mapping[str, Any] | None = None,
    ) -> StoreWriter:
        """Begin a store, or go on with an unfinished one of the same identity and features.

        When resuming, what was stored at the beginning (calibration, files, weights) stays.
        Raises UserError if the path is taken, or by a dump with other arguments.
        """
        StoreWriter.check(path)
        staging = staging_of(path)
        attributes = {
            "format": FORMAT,
            "version": VERSION,
            "state": "writing",
            "identity": _json(identity, "identity"),
            "features": features.to_json(),
            "software": _json(software or {}, "software"),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        stored = StoreWriter._stored(staging)
        if stored is None:
            with _writing(str(path)):
                _create(staging, attributes, calibration, files or {}, weights or {}, head)
            stored = StoreWriter._stored(staging) or attributes
        else:
            differ = [
                line
                for key in ("identity", "features")
                for line in _differences(stored[key], attributes[key], key)
            ]
            if differ:
                raise UserError(
                    f"{path}: holds an unfinished dump with other arguments: {'; '.join(differ)}; "
                    "use the same arguments to go on, or give another name"
                )
        return StoreWriter(staging, stored)

    @staticmethod
    def check(path: str | Path) -> None:
        """UserError unless a store can be begun, or gone on with, at `path`."""
        staging = staging_of(path)
        stored = StoreWriter._stored(staging)
        if stored is None and not staging.path.parent.is_dir():
            raise UserError(f"{path}: folder {staging.path.parent} does not exist; make it")
        if stored is not None and stored["state"] == "sealed":
            if isinstance(staging, Hdf5Staging):
                staging.clean()
            raise UserError(f"{path}: exists already and is finished; give another name")

    @staticmethod
    def _stored(staging: Staging) -> dict[str, Any] | None:
        """Root attributes of what has the name; UserError if that is no store."""
        path = staging.path
        if not path.exists():
            return None
        try:
            if path.is_dir() != isinstance(staging, ZarrStaging):
                raise StoreError(f"{path}: not a store of this format")
            source = staging.source()
            attributes = source.attributes()
            source.close()
            check_root(attributes, str(path))
        except StoreError as error:
            raise UserError(
                f"{path}: exists and is not a feature store that can be continued ({error}); "
                "nothing was touched: give another name"
            ) from error
        return attributes

    @staticmethod
    def peek(path: str | Path) -> dict[str, Any] | None:
        """Root attributes of an unfinished store; None if there is none."""
        try:
            attributes = StoreWriter._stored(staging_of(path))
        except UserError:
            return None
        return attributes if attributes and attributes["state"] == "writing" else None

    @staticmethod
    def calibration(path: str | Path) -> Calibration:
        """(mean, deviation) float32 [D] of every hidden state of an unfinished store."""
        source = staging_of(path).source()
        found = {}
        for name in check_root(source.attributes(), str(path)).hidden:
            pair = [source.array(f"calibration/hidden/{name}/{k}") for k in ("mean", "deviation")]
            found[name] = (pair[0].read(0, pair[0].shape[0]), pair[1].read(0, pair[1].shape[0]))
        source.close()
        return found

    def part(self, number: int, token_counts: ArrayLike) -> PartWriter:
        """Begin a part; token_counts [n] are the tokens of its sequences."""
        self._check_number(number)

        def write(counts: Counts, arrays: dict[str, Array]) -> None:
            self.write_part(number, counts, arrays)

        return PartWriter(
            self.features, self._calibration, token_counts, write, f"{self.path}: part {number}"
        )

    def _check_number(self, number: int) -> None:
        if not 0 <= number < MAX_PART:
            raise StoreError(f"{self.path}: part number {number} is not in 0..{MAX_PART - 1}")
        if number in self.published:
            raise StoreError(f"{self.path}: part {number} is published already")

    def write_part(self, number: int, counts: Counts, arrays: Mapping[str, Array]) -> None:
        """Publish a part from encoded arrays (all of `layout.part_arrays`)."""
        self._check_number(number)
        with _writing(f"part {number} of {self.path}"):
            try:
                sink = self._staging.part(number)
                entries = {}
                for name, spec in part_arrays(self.features, counts).items():
                    values = _of_spec(arrays[name], spec, f"{self.path}: part {number}: {name}")
                    entries[name] = Entry.of(values, sink.array(name, spec, values))
                sink.attributes("", {"part": Part(number, counts, entries).to_json()})
                sink.close()
                self._staging.publish(number)
            except BaseException:
                self._staging.withdraw(number)
                raise
        self.published.add(number)

    def seal(self) -> None:
        """Write the manifest and finish the store. StoreError if no part was published."""
        if not self.published:
            raise StoreError(f"{self.path}: no part was published; there is nothing to seal")
        source = self._staging.source()
        manifest = unsealed_manifest(source, self._attributes, self.features)
        source.close()
        data = manifest.to_bytes()
        attributes = {k: v for k, v in self._attributes.items() if k != "arrays"}
        attributes["state"] = "sealed"
        attributes["checksum"] = seal_checksum(data, attributes["created"])
        values = np.frombuffer(data, np.uint8)
        with _writing(str(self.path)):
            self._staging.seal(attributes, teacher_array(values), values)
        self.close()

    def close(self) -> None:
        """Let another process write; published parts stay."""
        self._staging.unlock()


def _of_spec(values: Array, spec: ArraySpec, where: str) -> Array:
    if values.shape != spec.shape or values.dtype != spec.dtype:
        raise StoreError(
            f"{where}: internal error: {values.dtype}{list(values.shape)}, "
            f"expected {spec.dtype}{list(spec.shape)}"
        )
    return values


def _create(
    staging: Staging,
    attributes: dict[str, Any],
    calibration: Calibration,
    files: Mapping[str, bytes],
    weights: Weights,
    head: tuple[ArrayLike, ArrayLike] | None,
) -> None:
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
    recorder.sink.attributes("", attributes | {"arrays": recorder.entries})
    recorder.sink.close()
    staging.begin()
