"""Write a store: create or resume it, part by part, then seal it.

One process writes a store; or several do, each a part by its own lease (see `part_queue`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from store.containers.hdf5.staging import Hdf5Staging
from store.containers.interface import Right, Staging
from store.containers.paths import staging_of
from store.containers.zarr.staging import ZarrStaging
from store.containers.zarr.tree import ZarrSource
from store.errors import StoreError, Unreachable, without_remedy
from store.format.features import Calibration, Features
from store.format.layout import (
    FORMAT,
    MAX_PART,
    VERSIONS,
    Counts,
)
from store.format.manifest import (
    Part,
    check_root,
    digest,
    read_entries,
)
from store.read.store import FeatureStore
from store.read.unfinished import (
    published_part,
    published_parts,
    read_calibration,
)
from store.write.outside_parts import Outside, Weights, begin, complete, outside_arrays
from store.write.part import PartWriter
from store.write.part_queue import PartQueue
from store.write.publishing import write_arrays
from store.write.sealing import sealed_root
from support import files
from support.arrays import Array
from support.differences import changed, check_same, differences
from support.errors import ANOTHER, UserError
from support.lease import Lease, lease_path


def _json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        decoded: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be written as JSON ({error})") from error
    return decoded


@contextmanager
def _writing(path: Path | str, what: str = "") -> Iterator[None]:
    """Turn an error of the disk into a StoreError that tells the cause and what is kept."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py tells a full disk as RuntimeError
        kept = "" if isinstance(path, Path) and not path.exists() else " (published parts are kept)"
        raise StoreError(
            f"cannot write {what}{path}: {files.reason(error)} and start again with the same"
            f" arguments{kept}"
        ) from error


class StoreWriter:
    """A store being written; made by `create_or_resume`, or of one part by `join`."""

    def __init__(self, staging: Staging, attributes: dict[str, Any], lease: Right) -> None:
        self._staging, self._attributes, self._lease = staging, attributes, lease
        self.path = staging.path
        self.features = check_root(attributes, str(self.path))
        self._calibration = StoreWriter.calibration(self.path) or {}
        self.software: dict[str, Any] = attributes["software"]  # of the process that began it
        self.outside = read_entries(attributes["arrays"], str(self.path))
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
        more: Iterable[Outside | None] = (),
        lease: Lease | None = None,
    ) -> StoreWriter:
        """Begin a store, or go on with an unfinished one of the same identity and features.

        When resuming, what was stored at the beginning (calibration, files, weights, more) stays;
        what `repair` has moved aside of it is written again, and must be what it was. With the
        caller's own `lease` of the store other processes may be writing its parts: what they have
        begun stays, and the software must be the same. Raises UserError if the path is taken, or by
        a dump with other arguments; StoreError if what is there is damaged.
        """
        shared = lease is not None
        StoreWriter.check(path, shared)
        staging = staging_of(path)
        attributes = StoreWriter._begun_as(identity, features, software)
        StoreWriter._check_same(staging, attributes, shared)
        with _writing(staging.path):
            right: Right = lease or staging.lease()
            try:
                staging.mark = right.token
                StoreWriter.check(path, shared)  # another process may have sealed it meanwhile
                if not shared:
                    if isinstance(staging.path, Path):
                        PartQueue(staging.path).remove()
                    staging.clear()
                arrays = partial(
                    outside_arrays,
                    *(features, calibration, files or {}, weights or {}, head, tuple(more)),
                )
                if StoreWriter._check_same(staging, attributes):
                    StoreWriter._check_parts(staging)
                    complete(staging, StoreWriter._stored(staging) or {}, arrays)
                else:
                    begin(staging, attributes, arrays())
                return StoreWriter(staging, StoreWriter._stored(staging) or attributes, right)
            except BaseException:
                with suppress(OSError, UserError):
                    staging.clear(right.token)
                with suppress(Unreachable):  # the error before it is the one to report
                    right.close()
                raise

    @staticmethod
    def join(
        path: str | Path,
        number: int,
        lease: Lease,
        identity: Mapping[str, Any],
        features: Features,
        software: Mapping[str, Any],
    ) -> StoreWriter:
        """Write one part of a store that another process has begun, by a lease of the part.

        Raises UserError if the store has other arguments, was begun with other software, or is
        gone.
        """
        staging = staging_of(path)
        attributes = StoreWriter._begun_as(identity, features, software)
        if not StoreWriter._check_same(staging, attributes, shared=True):
            raise UserError(f"{path}: was removed while parts of it were made; start again")
        staging.mark = lease.token
        with suppress(OSError):  # one who was too slow may be writing it yet
            staging.clear_part(number)
        return StoreWriter(staging, StoreWriter._stored(staging) or attributes, lease)

    @staticmethod
    def unfinished(staging: Staging) -> dict[str, Any]:
        """Root attributes of an unfinished store. Raises UserError if there is none."""
        attributes = StoreWriter._stored(staging)
        if attributes is None or attributes["state"] != "writing":
            raise UserError(f"{staging.path}: is no unfinished store")
        return attributes

    @staticmethod
    def check_joinable(
        path: str | Path,
        identity: Mapping[str, Any],
        features: Features,
        software: Mapping[str, Any],
    ) -> None:
        """Raise UserError if a store at `path`, finished or not, is not what would be written."""
        attributes = StoreWriter._begun_as(identity, features, software)
        StoreWriter._check_same(staging_of(path), attributes, shared=True)

    @staticmethod
    def _begun_as(
        identity: Mapping[str, Any], features: Features, software: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the root attributes of a store that is begun now."""
        return {
            "format": FORMAT,
            "version": VERSIONS[0],  # what it is in the end is known when it is sealed
            "state": "writing",
            "identity": _json(identity, "identity"),
            "features": features.to_json(),
            "software": _json(software or {}, "software"),
            "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    @staticmethod
    def _check_same(staging: Staging, attributes: dict[str, Any], shared: bool = False) -> bool:
        """Whether there is a store. Raises UserError if it has other arguments; a shared one also
        if it was begun with other software."""
        stored = StoreWriter._stored(staging)
        if stored is None:
            return False
        found = StoreWriter.begun_otherwise(stored, attributes["identity"], attributes["features"])
        if found and all(key.startswith("features.encodings.") for key, _, _ in found):
            raise UserError(
                f"{staging.path}: holds an unfinished store in another form of codec"
                f" {stored['features']['codec']}, as an earlier version wrote it; make it anew:"
                f" {ANOTHER}"
            )
        check_same(staging.path, found)
        versions = changed(stored["software"], attributes["software"]) if shared else ""
        if versions:
            raise UserError(
                f"{staging.path}: was begun with other versions ({versions}), and processes that"
                " write one store together must have the same; install those, go on without --shard"
                " in one process, or give another name"
            )
        return True

    @staticmethod
    def begun_otherwise(
        stored: Mapping[str, Any], identity: Mapping[str, Any], features: Mapping[str, Any]
    ) -> list[tuple[str, str, str]]:
        """List what differs between the root attributes of a store and the identity and features,
        as JSON, of a dump; see `differences`."""
        encodings = Features.from_json(stored["features"]).level.encodings()
        told = {**stored["features"], "encodings": encodings}  # no prose
        then = {**stored, "features": told}
        now = {"identity": _json(identity, "identity"), "features": features}
        return list(chain.from_iterable(differences(then[key], now[key], key) for key in now))

    @staticmethod
    def finished(path: str | Path) -> dict[str, Any] | None:
        """Root attributes of a finished store; None if there is none. Raises UserError if what is
        there is no store, or something else is at work on it."""
        staging = staging_of(path)
        stored = StoreWriter._stored(staging)
        if stored is None or stored["state"] != "sealed":
            return None
        StoreWriter._tidy(staging)
        return stored

    @staticmethod
    def check(path: str | Path, shared: bool = False) -> None:
        """Raise UserError unless a store can be begun or continued at `path`; `shared` where other
        processes may write it, too."""
        if StoreWriter.finished(path) is not None:
            raise UserError(
                f"{path}: exists already and is finished; {ANOTHER}; or if it is damaged, move what"
                " is damaged aside with `feature-store repair` and type this again"
            )
        staging = staging_of(path)
        if isinstance(staging, Hdf5Staging) and not staging.exists() and staging.published():
            raise UserError(
                f"{staging.parts}: holds parts of an unfinished store whose file {path} is gone:"
                f" put that back and type this again; or remove {staging.parts} to begin anew"
            )
        staging.check_place()
        if not shared:
            with _writing(staging.path):
                staging.check_free()
                if isinstance(staging.path, Path):
                    PartQueue(staging.path).check_idle()

    @staticmethod
    def _tidy(staging: Staging) -> None:
        """Remove what a writer left that was killed between sealing and tidying up.

        Raises UserError if a writer or a repair is alive: then the parts belong to it.
        """
        if not isinstance(staging.path, Path):
            return  # a writer of a bucket leaves a lease and folders of its machine, no more
        parts = staging.parts if isinstance(staging, Hdf5Staging) else None
        queue = PartQueue(staging.path)
        left = (lease_path(staging.path), queue.folder, *([parts] if parts else []))
        if not any(path.exists() for path in left):
            return
        # A folder that cannot be written is no reason to refuse.
        with suppress(OSError), closing(Lease(staging.path)):
            stored = StoreWriter._stored(staging)  # a repair may have ended just now
            if isinstance(staging, Hdf5Staging) and stored and stored["state"] == "sealed":
                staging.clean()
            if stored and stored["state"] == "sealed":
                queue.remove()

    @staticmethod
    def _stored(staging: Staging) -> dict[str, Any] | None:
        """Root attributes of the store at a path, None if nothing is there. Raises UserError if it
        is no store."""
        path = staging.path
        if not staging.exists():
            return None
        try:
            if isinstance(path, Path) and path.is_dir() != isinstance(staging, ZarrStaging):
                raise StoreError(f"{path}: not a store of this format")
            source = staging.source()
            attributes = source.attributes()
            source.close()
            check_root(attributes, str(path))
        except StoreError as error:
            raise UserError(
                f"{path}: exists and is not a feature store that can be continued"
                f" ({without_remedy(error)}); nothing was touched: if it was one, run"
                f" `feature-store repair`; else {ANOTHER}"
            ) from error
        return attributes

    @staticmethod
    def _check_parts(staging: Staging) -> None:
        """Raise StoreError if a published part of an unfinished store does not say what it holds:
        hours later it could not be sealed."""
        with closing(staging.source()) as source:
            attributes = source.attributes()
            for _ in published_parts(source, check_root(attributes, str(staging.path))):
                pass

    @staticmethod
    def peek(path: str | Path, state: str = "writing") -> dict[str, Any] | None:
        """Root attributes of a store in this state; None if there is none that can be read."""
        try:
            attributes = StoreWriter._stored(staging_of(path))
        except Unreachable:  # nothing is known
            raise
        except UserError:
            return None
        return attributes if attributes and attributes["state"] == state else None

    @staticmethod
    def kept(path: str | Path) -> tuple[int, int]:
        """Count the parts and tokens that an unfinished store has so far."""
        source = staging_of(path).source()
        attributes = source.attributes()
        features = check_root(attributes, str(path))
        tokens = [part.counts.tokens for part in published_parts(source, features)]
        source.close()
        return len(tokens), sum(tokens)

    @staticmethod
    def calibration(path: str | Path) -> Calibration | None:
        """(mean, deviation) float32 [D] of every hidden state of an unfinished store; None if it
        lacks one.

        Raises StoreError if a checksum differs: all parts are encoded relative to them.
        """
        source = staging_of(path).source()
        found = read_calibration(source)
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

    def differing(self, number: int, token_counts: ArrayLike, **sequences: Any) -> list[str]:
        """Names of the arrays of a published part that differ from those of given sequences.

        Sequences are given as to `PartWriter.set_sequences`. Checksums are compared; the part is
        not read.
        """
        where, entries = f"{self.path}: part {number}", self.published_part(number).arrays
        part = PartWriter(self.features, self._calibration, token_counts, lambda *_: None, where)
        given = part.set_sequences(**sequences).items()
        return [name for name, values in given if digest(values) != entries[name].sha256]

    def published_part(self, number: int) -> Part:
        """The entry of a published part: counts and checksums."""
        source = self._staging.source()
        part = published_part(source, number, self.features)
        source.close()
        return part

    def _check_number(self, number: int) -> None:
        if not 0 <= number < MAX_PART:
            raise StoreError(f"{self.path}: part number {number} is not in 0..{MAX_PART - 1}")
        if number in self.published:
            raise StoreError(f"{self.path}: part {number} is published already")

    def write_part(self, number: int, counts: Counts, arrays: Mapping[str, Array]) -> None:
        """Publish a part from encoded arrays, all that `layout.part_arrays` names."""
        self._check_number(number)
        with _writing(self.path, f"part {number} of "):
            try:
                self._lease.check()
                sink = self._staging.part(number)
                write_arrays(sink, self.features, number, counts, arrays, str(self.path))
                self._lease.check()
                self._staging.publish(number)
            except BaseException:
                self._clear()
                raise
        self.published.add(number)

    def adopts(self, store: FeatureStore) -> bool:
        """Whether parts of a store can become parts of this one without being written again."""
        local = isinstance(self._staging, ZarrStaging) and isinstance(store.source, ZarrSource)
        return local and not store.source.remote and store.features == self.features

    def adopt_part(self, number: int, store: FeatureStore, place: int) -> None:
        """Publish the part at a place of a store that `adopts` allows as part `number`.

        The files are those of that store, by hard links, or copies where the disk has none; their
        bytes are not read. Raises StoreError where one of them is lacking, or is not the one that
        the manifest tells of.
        """
        self._check_number(number)
        assert isinstance(self._staging, ZarrStaging)
        reader = store.part(place)
        for name in reader.names():
            reader.array(name)
        part = replace(reader.part, number=number)
        folder = Path(store.path) / "parts" / str(reader.part.number)
        with _writing(self.path, f"part {number} of "):
            try:
                self._lease.check()
                self._staging.adopt(number, folder, part)
                self._staging.publish(number)
            except BaseException:
                self._clear()
                raise
        self.published.add(number)

    def seal(self) -> None:
        """Write the manifest and finish the store. Raises StoreError if no part was published.

        Only the lengths of sequences are read again: reading everything would take as long as
        `feature-store verify`, and it was on the disk before the parts got their names. Entries of
        parts go into the manifest as they are, so later readers find what a disk has lost since.
        """
        self.published = self._staging.published()  # other processes may have written some
        if not self.published:
            raise StoreError(f"{self.path}: no part was published; there is nothing to seal")
        with _writing(self.path):
            try:
                self._lease.check()
                with closing(self._staging.source()) as source:
                    make = partial(sealed_root, source, self._attributes, self.features)
                    self._staging.seal(make)
            except BaseException:
                self._clear()
                raise
        self.close()

    def _clear(self) -> None:
        """Remove what was begun. An error here is dropped, as the error before it is the one to
        report."""
        with suppress(OSError, UserError):
            self._staging.clear(self._staging.mark)

    def close(self) -> None:
        """Let another process write; published parts stay."""
        self._lease.close()


def sealed_as(
    staging: Staging,
    attributes: dict[str, Any],
    lease: Right,
    manifest: bytes | None,
    checksum: str | None,
) -> bool:
    """Seal an unfinished store again, if that gives the manifest, or the checksum of it, that it
    had: then nothing of it is lacking. Returns whether it did."""
    source = staging.source()
    made, data = sealed_root(source, attributes, check_root(attributes, str(staging.path)))
    source.close()
    if data != manifest and made["checksum"] != checksum:
        return False
    StoreWriter(staging, attributes, lease).seal()
    return True
