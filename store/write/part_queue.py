"""A queue of parts, shared by the processes that write one store.

It is a folder `.<name>.queue` next to the unfinished store. The process that holds the lease of the
store fills it: file `<n>` describes part n, in bytes that only these processes interpret, and
`end.json` marks the end. A process takes a part by a lease of its file, and removes the file when
the part is published.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from teachonce.store.containers.paths import queue_of
from teachonce.store.format.layout import part_numbers_in
from teachonce.support import files
from teachonce.support.lease import Lease, Taken, check_free

END, TEMPORARY = "end.json", ".tmp-"


class QueuedPart(NamedTuple):
    """Holds a part taken from the queue: its number, the bytes that describe it, and the lease to
    write it."""

    number: int
    data: bytes
    lease: Lease


class PartQueue:
    """Manages the queue of a store at a local path, for one of the processes that write the
    store."""

    def __init__(self, store: str | Path) -> None:
        self.folder = queue_of(store)
        self._taken: dict[int, Lease] = {}

    def begin(self) -> None:
        """Make the folder, unless it exists."""
        self.folder.mkdir(exist_ok=True)

    def numbers(self) -> set[int]:
        """Return the numbers of all parts in the queue, including those being made."""
        return self._numbers("")

    def leased(self) -> set[int]:
        """Return the numbers of the parts with a lease, whose holder may have died."""
        return self._numbers(".lease")

    def _numbers(self, ending: str) -> set[int]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        begin = "." if ending else ""
        return part_numbers_in(
            name.removeprefix(begin).removesuffix(ending)
            for name in names
            if name.startswith(begin) and name.endswith(ending)
        )

    def put(self, number: int, data: bytes, mark: str) -> None:
        """Queue a part. Raises OSError if it cannot be written or the queue is missing."""
        self._write(str(number), data, mark)

    def _write(self, name: str, data: bytes, mark: str) -> None:
        # The mark is needed, because a filler that lost its lease may still be writing this file.
        new = self.folder / f"{TEMPORARY}{mark}-{name}"
        try:
            new.unlink(missing_ok=True)
            with os.fdopen(files.create(new), "wb") as file:
                file.write(data)
            files.sync(new)
            files.rename(new, self.folder / name)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def read(self, number: int) -> bytes | None:
        """Return the bytes that describe a part; None if it is not in the queue."""
        with suppress(FileNotFoundError):
            opened = files.open_ordinary(self.folder / str(number))
            with os.fdopen(opened, "rb") as file:
                return file.read()
        return None

    def take(self, place: int = 0, size: int = 1) -> QueuedPart | None:
        """Take a part that no living process has taken; None if there is none.

        size: number of processes. place: number of this process. Part numbers k with k % `size` ==
        `place` come first, parts of dead processes last.
        """
        leased = self.leased()
        # `tuple` copies the keys in one step, because another thread may release a part meanwhile.
        free = self.numbers() - set(tuple(self._taken))
        # Each process tries its own numbers first, so that two rarely try to take the same lease.
        numbers = sorted(free, key=lambda n: (n in leased, n % size != place, n))
        for number in numbers:
            try:
                lease = Lease(self.folder / str(number))
            except Taken:
                continue
            except FileNotFoundError:  # the queue was removed: the store is finished
                return None
            self._taken[number] = lease
            # The data are missing if another process has published the part since the listing.
            if (data := self.read(number)) is not None:
                return QueuedPart(number, data, lease)
            self.release(number)
        return None

    def drop(self, number: int) -> None:
        """Remove a part from the queue, if the queue has it."""
        (self.folder / str(number)).unlink(missing_ok=True)

    def release(self, number: int) -> None:
        """Release the lease of a part, so that another process can take it."""
        if lease := self._taken.pop(number, None):
            lease.close()

    def close(self) -> None:
        """Release the leases of all parts."""
        for number in list(self._taken):
            self.release(number)

    def end(self, counts: Mapping[str, int], mark: str) -> None:
        """Mark the end of the queue; `counts["parts"]` is the number of all parts."""
        self._write(END, json.dumps(counts).encode(), mark)

    def ended(self) -> dict[str, int] | None:
        """Return the counts that were passed to `end`; None if it was not called yet."""
        with suppress(OSError, ValueError):
            counts = json.loads((self.folder / END).read_bytes())
            if isinstance(counts, dict) and isinstance(counts.get("parts"), int):
                return counts
        return None

    def check_idle(self) -> None:
        """Raise Taken if a living process makes one of the parts."""
        for number in self.leased():
            check_free(self.folder / str(number))

    def remove(self) -> None:
        """Remove the queue. Files that cannot be removed are not reported."""
        if not self.folder.is_symlink():
            shutil.rmtree(self.folder, ignore_errors=True)
