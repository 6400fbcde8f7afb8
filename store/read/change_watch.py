"""Detect that a store was rewritten after it was opened.

A reader must not continue with texts that `feature-store forget` removed.
"""

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
from teachonce.store.errors import StoreError, Unreachable

SECONDS, SECONDS_REMOTE = 1.0, 60.0  # between two checks; a check is a stat, or a request
ROOT = "zarr.json"
AGAIN = (
    "documents were forgotten, or another store now has its name: wait until the command that"
    " writes it ends, and start again with the new store; a student needs a new --out"
)
Stamp = tuple[int, int, int]


class ChangeWatch:
    """Detects by the checksum in the root whether a store is still the store that was opened.

    An unfinished store is not watched, because it grows.
    """

    def __init__(self, source: StoreSource, attributes: Mapping[str, Any]) -> None:
        self._source = source
        sealed = attributes.get("state") == "sealed"
        self.opened: str | None = attributes.get("checksum") if sealed else None
        self._seconds = SECONDS_REMOTE if source.remote else SECONDS
        self._stamp: Stamp | None = None
        self._next = monotonic() + self._seconds

    def check_if_due(self) -> None:
        """Call `check` unless it ran less than SECONDS ago."""
        # A call takes 0.4 us, or 40 us if a stat is due, on two busy cores: little enough for each
        # batch.
        if monotonic() >= self._next:
            self.check()

    def check(self) -> None:
        """Raise StoreError if the store was rewritten or removed since it was opened.

        If a network or disk does not answer, nothing is raised.
        """
        if self.opened is None:
            return
        self._next = monotonic() + self._seconds
        try:
            stamp = None if self._source.remote else self._current_stamp()
            # Comparing stamps first spares reading and parsing the root.
            if stamp is None or stamp != self._stamp:
                self._compare()
            self._stamp = stamp
        except StoreError:
            self._next = 0.0  # the next read raises the same error at once
            raise
        # This shows no change; a read that needs the disk or network raises the error itself.
        except (Unreachable, OSError):
            pass

    @contextmanager
    def reporting_changes(self) -> Iterator[None]:
        """Check for changes after the `with` block, and also if the block raises StoreError."""
        try:
            yield
        except StoreError:
            self.check()  # an array that was replaced looks like damage
            raise
        self.check_if_due()

    def _current_stamp(self) -> Stamp:
        """Return inode, time and size of the file that every rewrite of the store replaces."""
        try:
            status = os.stat(self._source.address)
            if stat.S_ISDIR(status.st_mode):
                status = os.stat(Path(self._source.address, ROOT))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreError(
                f"{self._source.path}: was deleted or moved while it was being read; restore it,"
                " or make it again"
            ) from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _compare(self) -> None:
        path, remote = self._source.path, self._source.remote
        # An HDF5 source still has the old file open, so the path is opened again.
        source = self._source if remote else open_source(self._source.address, None)
        try:
            attributes = source.attributes()
        finally:
            if not remote:
                source.close()
        if attributes.get("state") != "sealed":
            raise StoreError(f"{path}: is being rewritten while it is read; {AGAIN}")
        self.compare(attributes.get("checksum"))

    def compare(self, checksum: object) -> None:
        """Raise StoreError if `checksum` differs from the checksum of the opened store."""
        if checksum != self.opened:
            raise StoreError(f"{self._source.path}: was rewritten while it was being read; {AGAIN}")
