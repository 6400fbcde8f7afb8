"""Protocols that a container (Zarr, HDF5) implements to read, write and start a store, and the code
that all containers share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.disk_cache import DiskCache
from teachonce.store.containers.untrusted import MAX_LISTED
from teachonce.store.errors import VERIFY, StoreError
from teachonce.store.format.layout import ArraySpec, groups_above, part_number
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.support.files import WRITABLE
from teachonce.support.lease import Lease, check_free

SealContent = Callable[[Callable[[str, Array], object]], tuple[dict[str, Any], bytes]]
"""Type of a function that returns the root attributes and the manifest of a finished store. Its
argument is a function that writes an array of the index, given its path and values."""


class Slices(Protocol):
    """Reads one stored array by slices of rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, begin: int, end: int) -> Array:
        """Return rows begin..end, decoded. Raises StoreError if the bytes are damaged or
        missing."""

    def read_into(self, begin: int, end: int, out: Array) -> None:
        """Read rows begin..end into a contiguous array [end - begin, ...] of the stored dtype."""

    def prefetch(self, begin: int, end: int) -> None:
        """Announce that rows begin..end will be read soon, so that the disk can read ahead."""


class StoredSlices(Slices, Protocol):
    """Reads an array in a container by slices of rows; see `Slices`."""

    chunk_rows: int  # rows of a chunk


class RowSlices:
    """Reads an array whose rows a subclass decodes from stored chunks; see `Slices`."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], chunk_rows: int, where: str
    ) -> None:
        self.shape, self.dtype, self.chunk_rows, self.where = shape, dtype, chunk_rows, where

    def decode(self, begin: int, end: int, out: Array) -> None:
        """Fill `out` with rows begin..end; the caller has checked that they exist. Raises Damage,
        OSError."""
        raise NotImplementedError

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        out = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.read_into(begin, end, out)
        return out

    def read_into(self, begin: int, end: int, out: Array) -> None:
        if begin >= end:
            return
        expected = (end - begin, *self.shape[1:]), self.dtype
        inside = begin >= 0 and end <= self.shape[0]
        if not inside or (out.shape, out.dtype) != expected or not out.flags.c_contiguous:
            raise ValueError(f"{self.where}: rows {begin}..{end} do not fit into {out.shape}")
        # Unreachable passes through, because a failure of the network is not damage.
        try:
            self.decode(begin, end, out)
        except (Damage, OSError) as error:
            raise StoreError(
                f"{self.where}: rows {begin}..{end} cannot be decoded ({error}); {VERIFY}"
            ) from error


def damaged_chunks(array: StoredSlices) -> list[int]:
    """Return the numbers of the first MAX_LISTED chunks (along the rows) that cannot be decoded."""
    bad, rows = [], array.chunk_rows
    for number, begin in enumerate(range(0, array.shape[0], rows)):
        try:
            array.read(begin, min(begin + rows, array.shape[0]))
        except StoreError:
            bad.append(number)
            if len(bad) == MAX_LISTED:
                break
    return bad


class Flaw(NamedTuple):
    """Describes a problem that only the container can find: a line for a person, and the path of
    the group or array.

    unknown: a file or object that the format does not define; it is never read.
    explained_by_unknown: an unknown object in the store explains the problem, because it changes
        the hash at the end of an HDF5 file. It is reported only if there is no such object.
    """

    line: str
    path: str
    unknown: bool = False
    explained_by_unknown: bool = False


def unknown_flaw(path: str, kind: str) -> Flaw:
    """Return the flaw of a file, folder or object that the format does not define."""
    number = part_number(path.removeprefix("parts/"))
    if number is None or kind == "file":
        return Flaw(f"extra {kind} {path}", path, unknown=True)
    return Flaw(f"extra part {number}, which is not in the manifest", path, unknown=True)


def groups_of(arrays: Iterable[str], group: str = "") -> set[str]:
    """Return the paths of a group and of the groups in it that contain these arrays. The root, '',
    always has the group `parts`."""
    prefix = f"{group}/".lstrip("/")
    above = {path for name in arrays for path in groups_above(name) if path.startswith(prefix)}
    return above | ({group} if group else {"", "parts"})


class StoreSource(Protocol):
    """Reads a tree of groups, arrays and attributes."""

    path: str  # as it was given; for messages
    # What is opened: a URL, or an absolute path, because the process may change its working
    # directory meanwhile.
    address: str
    options: dict[str, Any] | None  # of the file system behind a URL
    remote: bool  # read over a network, which may alter bytes
    grain: int  # bytes of an array that are decoded at once, roughly; smaller gaps are read, too
    cache: DiskCache | None  # of fetched ranges, on a local disk

    def use_cache(self, cache: DiskCache, checksum: str) -> None:
        """Cache the bytes that are read from a sealed store on a local disk, under the checksum of
        the store. Does nothing for a local store."""

    def attributes(self, group: str = "") -> dict[str, Any]:
        """Return the attributes of a group ('' is the root). Raises StoreError if it is missing."""

    def members(self, group: str) -> list[str]:
        """Return the sorted names directly under a group; empty if there is no such group."""

    def announce(self, names: Iterable[str]) -> None:
        """Announce that small one-dimensional arrays are read soon, so that all are requested at
        once. Does nothing for a local store."""

    def expect(self, group: str, name: str, spec: ArraySpec, fingerprint: str) -> None:
        """Compute the metadata of an array of a part instead of requesting them, if they match
        `fingerprint`, their checksum in the manifest. Does nothing for a local store."""

    def array(self, name: str) -> StoredSlices:
        """Open an array by its path; its data is read later. Raises StoreError if it is missing."""

    def flaws(
        self, arrays: Collection[str], group: str = "", parts: Container[int] = ()
    ) -> list[Flaw]:
        """List the missing, altered and unknown files or objects in a group ('' is the root) that
        should contain `arrays`. The parts with the numbers `parts` are left out."""

    def fingerprint(self, name: str) -> str | None:
        """Return the checksum of an array's own metadata; None if the container stores them in no
        file of their own."""

    def forget(self, name: str) -> None:
        """Drop the cached bytes of an array that looks damaged: a later read fetches it again."""

    def format_violation(self, name: str) -> str | None:
        """Describe how the stored form of an array violates FORMAT.md; None if it does not."""

    def close(self) -> None:
        """Close open files; a later read opens them again."""


class Sink(Protocol):
    """Writes a tree, array by array."""

    def attributes(self, group: str, values: dict[str, Any]) -> None: ...

    def array(self, name: str, values: Array, spec: ArraySpec | None = None) -> str | None:
        """Write a whole array; `spec` is None outside the parts. Returns its fingerprint (see
        `StoreSource.fingerprint`)."""

    def close(self) -> None:
        """Finish writing: all data are on the disk when this returns."""


class WriteLease(Protocol):
    """Holds this process's exclusive lease to write a store, until `close` or the process ends."""

    token: str

    def check(self) -> None:
        """Raise UserError if another process has taken the lease over."""

    def close(self) -> None:
        """Release the lease, so that other processes can write. A second call does nothing."""


class Staging(Protocol):
    """Start a store in one container, publish its parts and seal it, in atomic steps."""

    @property
    def path(self) -> Path | str:
        """Return the path of the store, or its URL in a bucket."""

    mark: str  # in temporary names, so that writers with different leases write different files

    def exists(self) -> bool:
        """Return whether anything exists at the path."""

    def check_place(self) -> None:
        """Raise UserError if no store can be created at `path`."""

    def check_free(self) -> None:
        """Raise Taken if a living process other than this one writes the store."""

    def lease(self, held: Lease | None = None) -> WriteLease:
        """Take the lease to write the store, or use `held`, a lease that the caller has taken. The
        token of the lease becomes `mark`. Raises Taken if a living process has the lease."""

    def clear(self, mark: str = "") -> None:
        """Remove everything under the temporary names of the writer with `mark`; without `mark`, of
        all writers."""

    def clear_part(self, number: int) -> None:
        """Remove one part under the temporary names of all writers."""

    def create(self) -> Sink:
        """Create the empty tree of a new store under a temporary name; `begin` publishes it."""

    def begin(self) -> None:
        """Publish the tree of `create` under its final name, as an unfinished store without
        parts."""

    def complete(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], missing: set[str]
    ) -> None:
        """Write the arrays named in `missing` into an unfinished store, add their entries to its
        root, and write missing groups. After a kill, another call continues."""

    def source(self) -> StoreSource:
        """Open the unfinished store for reading."""

    def part(self, number: int) -> Sink:
        """Create the tree of a part under a temporary name; `publish` publishes it."""

    def publish(self, number: int) -> None:
        """Publish the finished part under its final name, in one atomic step."""

    def published(self) -> set[int]:
        """Return the numbers of the published parts."""

    def seal(self, make: SealContent) -> None:
        """Write index, manifest and root attributes, which `make` returns. The last step is atomic:
        the store is unfinished before it and finished after it."""


class OnDisk:
    """Describes a store under construction on a disk: its path and its lease; see `Staging`."""

    def __init__(self, path: Path) -> None:
        self.path, self.mark = path, ""

    @property
    def _new(self) -> Path:
        """Return the temporary path of a new store."""
        return self.path.parent / f".{self.path.name}.new-{self.mark}"

    def exists(self) -> bool:
        return self.path.exists()

    def check_place(self) -> None:
        folder = self.path.parent
        if not folder.exists():
            raise UserError(f"{self.path}: folder {folder} does not exist; make it")
        if not folder.is_dir():
            raise UserError(f"{self.path}: {folder} is a file; give a path in a folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{self.path}: folder {folder} cannot be written to; {WRITABLE}")

    def check_free(self) -> None:
        check_free(self.path)

    def lease(self, held: Lease | None = None) -> Lease:
        lease = held or Lease(self.path)
        self.mark = lease.token
        return lease
