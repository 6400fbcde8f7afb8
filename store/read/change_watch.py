"""Notice that a store was written again after it was opened: a reader must not go on with texts
that were forgotten."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from teachonce.store.containers.interface import StoreSource
from teachonce.store.containers.paths import open_source
from teachonce.store.errors import MISSING, StoreError, Unreachable

SECONDS, SECONDS_REMOTE = 1.0, 60.0  # between two looks; a look is a stat, or a request
ROOT = "zarr.json"
AGAIN = (
    "documents were forgotten, or another store has its name: when that is done, start again with"
    " the store that is there then; a student needs a new --out"
)
Stamp = tuple[int, int, int]


class ChangeWatch:
    """Compares a store with the one that was opened, by the checksum at its root.

    On a disk, the root is only read if the stat of its file differs: a look takes 0.4 us, with a
    stat 40 us, on two busy cores. An unfinished store, which grows, is not watched.
    """

    def __init__(self, source: StoreSource, attributes: Mapping[str, Any]) -> None:
        self._source, self._place = source, Path(source.path).absolute()
        sealed = attributes.get("state") == "sealed"
        self.opened: str | None = attributes.get("checksum") if sealed else None
        self._seconds = SECONDS_REMOTE if source.remote else SECONDS
        self._stamp: Stamp | None = None
        self._next = monotonic() + self._seconds

    def look(self) -> None:
        """Do what `check` does, unless that was done less than SECONDS ago."""
        if monotonic() >= self._next:
            self.check()

    def check(self) -> None:
        """Raise StoreError if the store is no longer the one that was opened. If a network or disk
        does not answer, nothing is known and nothing is raised."""
        if self.opened is None:
            return
        self._next = monotonic() + self._seconds
        try:
            stamp = None if self._source.remote else self._stamped()
            if stamp is None or stamp != self._stamp:
                self._compare()
            self._stamp = stamp
        except StoreError:
            self._next = 0.0  # whoever goes on reading gets the same error at once
            raise
        except (Unreachable, OSError):
            pass

    @contextmanager
    def reporting_changes(self) -> Iterator[None]:
        """If the block raises StoreError, raise that of `check` instead, if it has one: an array
        that was replaced looks like damage. Also look after the block."""
        try:
            yield
        except StoreError:
            self.check()
            raise
        self.look()

    def _stamped(self) -> Stamp:
        """Inode, time and size of the file that each rewriting of the store replaces."""
        try:
            found = os.stat(self._place)
            if stat.S_ISDIR(found.st_mode):
                found = os.stat(self._place / ROOT)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(
                f"{self._source.path}: was removed while it was read ({MISSING})"
            ) from error
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _compare(self) -> None:
        path, remote = self._source.path, self._source.remote
        # An HDF5 source has the old file open.
        source = self._source if remote else open_source(self._place, None)
        try:
            now = source.attributes()
        finally:
            if not remote:
                source.close()
        if now.get("state") != "sealed":
            raise StoreError(f"{path}: is being written again while it is read; {AGAIN}")
        self.compare(now.get("checksum"))

    def compare(self, checksum: object) -> None:
        """Raise StoreError if this is not the checksum of the store that was opened."""
        if checksum != self.opened:
            raise StoreError(f"{self._source.path}: was written again while it was read; {AGAIN}")
