"""Write a store: create or resume it, write it part by part, then seal it.

One process writes a store, or several do, each a part under its own lease (see `part_queue`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from numpy.typing import ArrayLike

from teachonce.store.containers.interface import Staging, WriteLease
from teachonce.store.containers.paths import staging_of
from teachonce.store.containers.zarr.staging import ZarrStaging
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import StoreError, Unreachable
from teachonce.store.format.features import Features
from teachonce.store.format.layout import MAX_PART, Counts
from teachonce.store.format.manifest import Part, check_root, digest, read_entries
from teachonce.store.format.sequences import Sequences
from teachonce.store.read.manifests import published_parts
from teachonce.store.read.store import FeatureStore
from teachonce.store.write import existing, tree
from teachonce.store.write.part import PartWriter
from teachonce.store.write.part_queue import PartQueue
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease


class StoreWriter:
    """Writes a store. `create_or_resume` makes it; `join` makes one for a single part.

    `part` makes an empty part, which the caller fills; `publish` stores it. A published part never
    changes; `seal` finishes the store.
    """

    # These functions take a path, for callers that have no writer yet.
    check_writable = staticmethod(existing.check_writable)
    check_joinable = staticmethod(existing.check_joinable)
    finished, unfinished = staticmethod(existing.finished_root), staticmethod(existing.unfinished)
    peek, published_counts = staticmethod(existing.peek), staticmethod(existing.published_counts)
    calibration = staticmethod(existing.stored_calibration)
    changed_arguments = staticmethod(existing.changed_arguments)

    def __init__(self, staging: Staging, attributes: dict[str, Any], lease: WriteLease) -> None:
        self._staging, self._attributes, self._lease = staging, attributes, lease
        self.path = staging.path
        self.features = check_root(attributes, str(self.path))
        # The stored calibration is used, not the caller's: earlier parts are encoded relative to
        # it.
        self._calibration = existing.stored_calibration(self.path) or {}
        self.software: dict[str, Any] = attributes["software"]  # of the process that started it
        self.outside = read_entries(attributes["arrays"], str(self.path))
        self.published: set[int] = staging.published()

    @staticmethod
    def create_or_resume(
        path: str | Path,
        identity: Mapping[str, Any],
        features: Features,
        *,
        software: Mapping[str, Any] | None = None,
        lease: Lease | None = None,
        **outside: Unpack[tree.OutsideArguments],
    ) -> StoreWriter:
        """Create a store, or resume an unfinished one of the same identity and features.

        `outside` are the arrays outside the parts: `calibration`, the mean and standard
        deviation [D] of each hidden state; the teacher's `files` and `weights` by name; `head`, the
        weight [V, D] and bias [V] of its LM head, for logits of tier `head`; `extras`, optional
        groups. A resumed store retains the arrays that it has; arrays that `repair` has quarantined
        are written again, and must have the same values. If the caller passes its own `lease` of
        the store, other processes may be writing parts: their unfinished parts are not touched, and
        the software must be the same. Raises UserError if the path is taken, or if its store has
        other arguments; StoreError if the store is damaged.
        """
        shared, arrays = lease is not None, tree.OutsideParts(**outside)
        existing.check_writable(path, shared)
        staging = staging_of(path)
        attributes = existing.new_attributes(identity, features, software)
        existing.check_continued(staging, attributes, shared)
        with existing.disk_errors(staging.path):
            write_lease = staging.lease(lease)
            try:
                # Another process may have sealed the store before this one had the lease.
                existing.check_writable(path, shared)
                # If nobody else writes, all files under temporary names are of dead writers.
                if not shared:
                    if isinstance(staging.path, Path):
                        PartQueue(staging.path).remove()
                    staging.clear()
                if existing.check_continued(staging, attributes):
                    existing.check_part_entries(staging)
                    root = existing.root_of(staging) or {}
                    tree.write_missing(staging, root, features, arrays)
                else:
                    tree.create(staging, attributes, arrays.arrays(features))
                return StoreWriter(staging, existing.root_of(staging) or attributes, write_lease)
            except BaseException:
                with suppress(OSError, UserError):
                    staging.clear(write_lease.token)
                with suppress(Unreachable):  # the error before it is the one to report
                    write_lease.close()
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
        """Write one part of a store that another process has created, under a lease of the part.

        Raises UserError if the store has other arguments, was started with other software, or was
        removed.
        """
        staging = staging_of(path)
        attributes = existing.new_attributes(identity, features, software)
        if not existing.check_continued(staging, attributes, shared=True):
            raise UserError(
                f"{path}: was deleted while its parts were being written; run the same command"
                " again"
            )
        staging.lease(lease)
        with suppress(OSError):  # a process that lost its lease may still be writing it
            staging.clear_part(number)
        return StoreWriter(staging, existing.root_of(staging) or attributes, lease)

    def part(self, number: int, token_counts: ArrayLike) -> PartWriter:
        """Make an empty part; token_counts [n] are the tokens of its sequences."""
        self._check_number(number)
        return self._part(number, token_counts)

    def _part(self, number: int, token_counts: ArrayLike) -> PartWriter:
        where = f"{self.path}: part {number}"
        return PartWriter(self.features, self._calibration, token_counts, number, where)

    def publish(self, part: PartWriter) -> None:
        """Store a whole part in one atomic step. Raises StoreError if rows are missing."""
        self.write_part(part.number, *part.take())

    def write_part(self, number: int, counts: Counts, arrays: Mapping[str, Array]) -> None:
        """Publish a part from encoded arrays: all arrays of `layout.part_arrays`."""
        with self._publishing(number):
            tree.write_part_tree(self._staging.part(number), self.features, number, counts, arrays)

    def differing(self, number: int, token_counts: ArrayLike, sequences: Sequences) -> list[str]:
        """Compare arrays of a published part with `sequences`; return the names of differing ones.

        Only checksums are compared; the part is not read.
        """
        entries = self.published_part(number).arrays
        arrays = self._part(number, token_counts).set_sequences(sequences).items()
        return [name for name, values in arrays if digest(values) != entries[name].sha256]

    def published_part(self, number: int) -> Part:
        """Return the entry of a published part: counts and checksums."""
        with closing(self._staging.source()) as source:
            return next(published_parts(source, self.features, [number]))

    def _check_number(self, number: int) -> None:
        if not 0 <= number < MAX_PART:
            raise StoreError(f"{self.path}: part number {number} is not in 0..{MAX_PART - 1}")
        if number in self.published:
            raise StoreError(f"{self.path}: part {number} is published already")

    @contextmanager
    def _publishing(self, number: int) -> Iterator[None]:
        """Publish part `number` when the `with` block that writes it ends. Raises UserError if the
        lease is lost, StoreError for an invalid number and for errors of the disk."""
        self._check_number(number)
        with existing.disk_errors(self.path, f"part {number} of "), self._leased():
            yield
            # The lease is checked again: if it was lost meanwhile, another process may be writing
            # this part.
            self._lease.check()
            self._staging.publish(number)
        self.published.add(number)

    @contextmanager
    def _leased(self) -> Iterator[None]:
        """Check the lease, then run the `with` block; if either fails, remove what was written."""
        try:
            self._lease.check()
            yield
        except BaseException:
            # An error here is dropped, because an earlier error is being raised.
            with suppress(OSError, UserError):
                self._staging.clear(self._staging.mark)
            raise

    def adopts(self, store: FeatureStore) -> bool:
        """Return whether parts of `store` can become parts of the new store without being written
        again."""
        local = isinstance(self._staging, ZarrStaging) and isinstance(store.source, ZarrSource)
        return local and not store.source.remote and store.features == self.features

    def adopt_part(self, number: int, store: FeatureStore, index: int) -> None:
        """Publish part `index` of a store, for which `adopts` is true, as part `number`.

        index: position of the part in the manifest of `store`. The files of the new part are hard
        links to those of `store`, or copies if the disk has no links; their bytes are not read.
        Raises StoreError if a file is missing, or does not match the manifest.
        """
        assert isinstance(self._staging, ZarrStaging)
        reader = store.part(index)
        for name in reader.names():
            reader.array(name)
        part = replace(reader.part, number=number)
        folder = Path(store.path) / "parts" / str(reader.part.number)
        with self._publishing(number):
            self._staging.adopt(number, folder, part)

    def seal(self, release: bool = True) -> None:
        """Write the manifest, finish the store, and `release` its lease. Raises StoreError if no
        part was published."""
        self.published = self._staging.published()  # other processes may have written some
        if not self.published:
            raise StoreError(
                f"{self.path}: no part was published, so there is nothing to seal; finish its dump"
            )
        with (
            existing.disk_errors(self.path),
            self._leased(),
            closing(self._staging.source()) as source,
        ):
            # Only the lengths of sequences are read again: reading everything would take as long as
            # `feature-store verify`, and it was on the disk before the parts got their names.
            # Entries of parts go into the manifest as they are, so later readers find what a disk
            # has lost since.
            self._staging.seal(partial(tree.sealed_root, source, self._attributes, self.features))
        if release:
            self.close()

    def close(self) -> None:
        """Release the lease, so that another process can write. Published parts remain."""
        self._lease.close()
