"""Check the arrays that a stream reads, in a thread."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from teachonce.store.read.part import PartReader
from teachonce.store.read.part_laws import check_offsets


class ReadingCheck:
    """Checks arrays of parts in a thread while a stream reads them.

    It compares checksums, then checks that offsets lie in the texts. `sound` is the set of arrays
    (part number, path) that passed before; arrays that pass are added.
    """

    def __init__(self, sound: set[tuple[int, str]]) -> None:
        # Two sets: a stream may end before its checks have, and the next stream must not take
        # submitted arrays for sound ones.
        self._sound, self._submitted = sound, set(sound)
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._running: list[Future[None]] = []

    def submit(self, part: PartReader, names: Iterable[str]) -> None:
        """Start to check arrays of a part that were not checked before; return at once."""
        new: list[str] = []
        for name in names:
            key = part.part.number, name
            if key not in self._submitted:
                self._submitted.add(key)
                self._running.append(self._thread.submit(self._check, part, name))
                new.append(name)
        # Queued after the checksums in the single thread, so that damage is reported as damage,
        # not as wrong offsets.
        if "token/begin" in new:
            self._running.append(self._thread.submit(check_offsets, part))

    def _check(self, part: PartReader, name: str) -> None:
        part.check(name)
        self._sound.add((part.part.number, name))

    def raise_errors(self, wait: bool = False) -> None:
        """Raise the StoreError of a finished check; with `wait`, wait for all checks first."""
        while self._running and (wait or self._running[0].done()):
            self._running.pop(0).result()

    def close(self) -> None:
        """Cancel the checks that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
