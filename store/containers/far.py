"""Pieces of the objects of a store over a network: asked for ahead, as many at once as the network
asks for, and kept in memory until they are used up, on a disk for as long as there is room."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple, Protocol

from zarr.core.sync import sync

from teachonce.store.containers.disk_cache import DiskCache, Piece
from teachonce.store.containers.network import Line
from teachonce.store.errors import Unreachable

HELD = 2**29  # bytes in memory; more only while they are waited for
FIRST_AT_ONCE, LEAST_AT_ONCE, MOST_AT_ONCE = 64, 4, 256
WORTH = 1.15  # times as many bytes a second, and twice the requests at once were worth it
UNWRITTEN = 2**28  # bytes that wait for a slow disk; what comes then is not kept there


class Range(NamedTuple):
    """Bytes begin..end of an object, as far as it has them; its last -begin ones if begin < 0."""

    name: str
    begin: int
    end: int


class Fetch(Protocol):
    """Fetches a range once."""

    line: Line

    async def piece(self, name: str, begin: int, end: int) -> Piece:
        """Read a range. FileNotFoundError if there is no such object; OSError if what came is of
        another length."""


class AtOnce:
    """How many requests are under way at once: twice as many as long as that brings more bytes a
    second, half as many where the server asks for fewer."""

    def __init__(self, line: Line) -> None:
        self.limit, self._line, self._slowed = FIRST_AT_ONCE, line, line.slowed
        self._most, self._best, self._before = MOST_AT_ONCE, 0.0, FIRST_AT_ONCE
        self._begin()

    def _begin(self) -> None:
        self._since, self._requests, self._bytes = time.monotonic(), 0, 0

    def rest(self) -> None:
        """Tell that fewer were asked for than might be: nothing is to be learnt from that."""
        self._begin()

    def done(self, size: int) -> None:
        """Tell that a request has been answered while others had to wait for it."""
        if self._line.slowed > self._slowed:
            self._slowed, self._best = self._line.slowed, 0.0
            self._most = self.limit = max(LEAST_AT_ONCE, self.limit // 2)
            self._begin()
            return
        self._requests, self._bytes = self._requests + 1, self._bytes + size
        if self._requests < 2 * self.limit:
            return
        speed = self._bytes / max(1e-9, time.monotonic() - self._since)
        if speed > WORTH * self._best:
            self._best, self._before = speed, self.limit
            self.limit = min(self._most, 2 * self.limit)
        else:
            self._most = self.limit = self._before
        self._begin()


class Far:
    """Reads ranges of objects. Threads may share it; a forked process may not.

    `slow` ranges are those asked for ahead, which wait for one another; one that is read is asked
    for at once. Raises Unreachable where no answer comes, FileNotFoundError for what is not there.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch, self.at_once = fetch, AtOnce(fetch.line)
        self._pieces: OrderedDict[Range, Piece] = OrderedDict()
        self._wanted: set[Range] = set()  # asked for ahead, and not yet read
        self._asked: dict[Range, Future[Piece]] = {}
        self._queue: OrderedDict[Range, Future[Piece]] = OrderedDict()
        self._held = self._running = 0
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop = sync(_running_loop())
        self._tasks: set[asyncio.Task[None]] = set()
        self._disk: DiskCache | None = None
        self._store = ""
        self._writer = ThreadPoolExecutor(1, "disk-cache")
        self._unwritten = 0

    def keep_on(self, disk: DiskCache, store: str) -> None:
        """Keep what is fetched from now on a disk as well, under the checksum of the store."""
        self._disk, self._store = disk, store

    def ask(self, wanted: Range) -> None:
        """Announce that a range is read soon."""
        with self._lock:
            if wanted in self._pieces:
                self._pieces.move_to_end(wanted)
                self._wanted.add(wanted)
                return
            if wanted in self._asked:
                return
        if self._disk is None or not self._disk.announced(self._store, *wanted):
            self._begun(wanted, ahead=True)

    def _begun(self, wanted: Range, ahead: bool) -> Future[Piece]:
        """The future of a range that is asked for, now or ahead of its turn."""
        with self._lock:
            future = self._asked.get(wanted)
            if future is None:
                future = self._asked[wanted] = self._queue[wanted] = Future()
            if ahead:
                self._wanted.add(wanted)
            elif wanted not in self._queue:
                return future
        self._loop.call_soon_threadsafe(self._start, None if ahead else wanted)
        return future

    def _start(self, hurried: Range | None = None) -> None:
        """Begin with what waits, as far as there are places; `hurried` needs none. In the loop."""
        with self._lock:
            if hurried is not None and (future := self._queue.pop(hurried, None)):
                self._run(hurried, future)
            while self._queue and self._running < self.at_once.limit:
                self._run(*self._queue.popitem(last=False))

    def _run(self, wanted: Range, future: Future[Piece]) -> None:
        self._running += 1
        task = self._loop.create_task(self._fetched(wanted, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetched(self, wanted: Range, future: Future[Piece]) -> None:
        size = wanted.end if wanted.begin < 0 else wanted.end - wanted.begin
        try:
            piece = await self._fetch.line.ask(
                wanted.name, lambda: self._fetch.piece(*wanted), size
            )
            self._keep(wanted, piece)
            future.set_result(piece)
        except BaseException as error:  # handed on to who reads it
            self._fail(error, {wanted: future})
        else:
            if self._queue:
                self.at_once.done(len(piece.data))
            else:
                self.at_once.rest()
        finally:
            self._running -= 1
            self._start()

    def _write(self, disk: DiskCache, wanted: Range, piece: Piece) -> None:
        disk.put(self._store, *wanted, piece)
        with self._lock:
            self._unwritten -= len(piece.data)

    def _fail(self, error: BaseException, failed: dict[Range, Future[Piece]]) -> None:
        """Hand an error on; what waits behind a network that does not answer fails with it."""
        with self._lock:
            if isinstance(error, Unreachable):
                failed |= self._queue
                self._queue.clear()
            for each in failed:
                self._asked.pop(each, None)
                self._wanted.discard(each)
        for future in failed.values():
            future.set_exception(error)

    def _keep(self, wanted: Range, piece: Piece) -> None:
        """Keep what was fetched, in memory and on the disk."""
        with self._lock:
            if self._disk is not None and self._unwritten < UNWRITTEN:
                self._unwritten += len(piece.data)
                self._writer.submit(self._write, self._disk, wanted, piece)
            self._asked.pop(wanted, None)
            self._hold(wanted, piece)

    def _hold(self, wanted: Range, piece: Piece) -> None:
        """Keep a range in memory, and let go of what was read longest ago. The lock is held."""
        self._let_go(wanted, read=False)
        self._pieces[wanted] = piece
        self._held += len(piece.data)
        for old in list(self._pieces) if self._held > HELD else ():
            if self._held <= HELD:
                break
            if old not in self._wanted or self._held > 2 * HELD:
                self._let_go(old)

    def _let_go(self, old: Range, read: bool = True) -> None:
        if piece := self._pieces.pop(old, None):
            self._held -= len(piece.data)
        if read:
            self._wanted.discard(old)

    def get(self, wanted: Range) -> Piece:
        """Read a range: from memory, from the disk, or over the network."""
        with self._lock:
            self._wanted.discard(wanted)
            if piece := self._pieces.get(wanted):
                self._pieces.move_to_end(wanted)
                return piece
            asked = wanted in self._asked
        kept = self._disk.get(self._store, *wanted) if self._disk and not asked else None
        if kept:
            with self._lock:
                self._hold(wanted, kept)
            return kept
        piece = self._begun(wanted, ahead=False).result()
        with self._lock:
            self._wanted.discard(wanted)
        return piece

    def used_up(self, done: Range) -> None:
        """Let go of a range that nobody is to read again soon."""
        with self._lock:
            self._let_go(done)

    def forget(self, name: str) -> None:
        """Let go of all that is kept of an object, so that it is fetched again."""
        with self._lock:
            for each in [each for each in self._pieces if each.name == name]:
                self._let_go(each)
        if self._disk is not None:  # behind what is to be written before it
            self._writer.submit(self._disk.forget, self._store, name).result()

    def close(self) -> None:
        """Let go of the memory, and of what nobody waits for; wait until what was fetched is on the
        disk."""
        with self._lock:
            for wanted, future in self._queue.items():
                self._asked.pop(wanted, None)
                future.cancel()
            self._queue.clear()
            self._pieces.clear()
            self._wanted.clear()
            self._held = 0
        if self._disk is not None:
            self._writer.submit(lambda: None).result()


async def _running_loop() -> Any:
    return asyncio.get_running_loop()
