"""Check what a stream reads, in a thread."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from teachonce.store.read.part import PartReader
from teachonce.store.read.part_laws import check_offsets


class ReadingCheck:
    """Checks the arrays of parts in one thread while a stream reads them: their checksums, then
    whether offsets lie in the texts.

    `sound` are the arrays, by part and path, that were found sound before; those found now are
    added.
    """

    def __init__(self, sound: set[tuple[int, str]]) -> None:
        self._sound, self._asked = sound, set(sound)
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._running: list[Future[None]] = []

    def begin(self, part: PartReader, names: Iterable[str]) -> None:
        """Check arrays of a part that were not checked before; return at once."""
        asked: list[str] = []
        for name in names:
            key = part.part.number, name
            if key not in self._asked:
                self._asked.add(key)
                self._running.append(self._thread.submit(self._check, part, name))
                asked.append(name)
        if "token/begin" in asked:
            self._running.append(self._thread.submit(check_offsets, part))

    def _check(self, part: PartReader, name: str) -> None:
        part.check(name)
        self._sound.add((part.part.number, name))

    def tell(self, wait: bool = False) -> None:
        """Raise the StoreError of an array that was found damaged; `wait` for all to be checked."""
        while self._running and (wait or self._running[0].done()):
            self._running.pop(0).result()

    def close(self) -> None:
        """Check no further."""
        self._thread.shutdown(wait=False, cancel_futures=True)
