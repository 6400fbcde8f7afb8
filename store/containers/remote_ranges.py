"""Read byte ranges of remote objects, several at once and before they are needed. Ranges are cached
in memory until they are released, and on a local disk while it has room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock
from typing import NamedTuple, Protocol

from zarr.core.sync import sync

from teachonce.store.containers.disk_cache import DiskCache, FetchedBytes
from teachonce.store.containers.network import Retrier
from teachonce.store.errors import Unreachable

MEMORY = 2**29  # bytes of cached ranges; prefetched ones may exceed it
# A number that adapts, up to 256, is no faster (RESULTS, "Reading over a network, d=384, top-16").
AT_ONCE = 64  # concurrent prefetch requests
UNWRITTEN = 2**28  # bytes waiting for a slow disk; beyond it, ranges are not cached there


class ByteRange(NamedTuple):
    """Describes bytes begin..end of an object, clipped to its size; if begin < 0, its last -begin
    bytes."""

    name: str
    begin: int
    end: int


class RangeFetcher(Protocol):
    """Fetches byte ranges of objects, without retries."""

    retrier: Retrier

    async def fetch(self, name: str, begin: int, end: int) -> FetchedBytes:
        """Read a range. Raises FileNotFoundError if there is no such object, WrongLength if the
        server sent another number of bytes."""


class RemoteRanges:
    """Reads ranges of objects. Threads may share it; a forked process may not.

    At most AT_ONCE prefetches run at once; other reads do not wait for them. Raises Unreachable if
    no answer comes, FileNotFoundError if an object is missing.
    """

    # A range is about a megabyte, not the whole array of a part: a stream mixes blocks of 8 parts
    # at a time, which have 0.5 to 1.1 GB, and its first pool takes a quarter of that.

    def __init__(self, fetch: RangeFetcher) -> None:
        self._fetch = fetch
        self._slots = asyncio.Semaphore(AT_ONCE)
        # The least recently used range comes first, where `_hold` starts to drop.
        self._ranges: OrderedDict[ByteRange, Future[FetchedBytes]] = OrderedDict()
        self._sizes: dict[ByteRange, int] = {}  # bytes of each range that has arrived
        self._unread: set[ByteRange] = set()  # prefetched, and not read yet
        self._bytes = 0
        self._lock = Lock()
        # This is the loop of zarr-python's thread, in which `sync` runs all other requests: an HTTP
        # session works in one loop only.
        self._loop = sync(_running_loop())
        self._failure: Unreachable | None = None
        self._disk: DiskCache | None = None
        self._store = ""
        # The loop, which receives all answers, must not wait for a disk. `forget` and `close` rely
        # on the order of work in a single thread.
        self._writer = ThreadPoolExecutor(1, "disk-cache")
        self._unwritten = 0

    def use_cache(self, disk: DiskCache, store: str) -> None:
        """Cache later fetches on a disk as well, under the checksum of the store."""
        self._disk, self._store = disk, store

    def prefetch(self, wanted: ByteRange) -> None:
        """Request a range that will be read soon."""
        disk = self._disk if wanted not in self._ranges else None
        if disk is None or not disk.announced(self._store, *wanted):
            self._request(wanted, ahead=True)

    def get(self, wanted: ByteRange) -> FetchedBytes:
        """Read a range: from memory, from the disk, or over the network."""
        with self._lock:
            self._unread.discard(wanted)
            if future := self._ranges.get(wanted):
                self._ranges.move_to_end(wanted)
        # The disk is read outside the lock: otherwise the loop, which takes the lock, would wait
        # for it.
        on_disk = self._disk if future is None else None
        if on_disk and (piece := on_disk.get(self._store, *wanted)):
            self.put(wanted, piece)
            return piece
        try:
            return (future or self._request(wanted)).result()
        except CancelledError:
            raise self._failure or Unreachable(
                f"{self._fetch.retrier.url}: was closed while it was being read; open the"
                " store again"
            ) from None

    def put(self, wanted: ByteRange, piece: FetchedBytes) -> None:
        """Store a range, whose bytes the caller has already, in memory, so that it is not
        fetched."""
        with self._lock:
            self._drop(wanted)
            self._ranges[wanted] = Future()
            self._ranges[wanted].set_result(piece)
            self._hold(wanted, piece)

    def _request(self, wanted: ByteRange, ahead: bool = False) -> Future[FetchedBytes]:
        """Return the future of a range, and request the range unless it was requested before."""
        with self._lock:
            if wanted not in self._ranges:
                # The coroutine takes this lock, too, before it looks for its own entry.
                fetched = self._fetched(wanted, ahead)
                self._ranges[wanted] = asyncio.run_coroutine_threadsafe(fetched, self._loop)
            if ahead:
                self._unread.add(wanted)
            self._ranges.move_to_end(wanted)
            return self._ranges[wanted]

    async def _fetched(self, wanted: ByteRange, ahead: bool) -> FetchedBytes:
        name, begin, end = wanted
        size = end if begin < 0 else end - begin
        try:
            async with self._slots if ahead else nullcontext():
                piece = await self._fetch.retrier.send(
                    name, lambda: self._fetch.fetch(name, begin, end), size
                )
        except Exception as error:
            with self._lock:
                self._drop(wanted)
            # The other requests would probably fail as well, each after its own patience.
            if isinstance(error, Unreachable):
                self._cancel(error)
            raise
        with self._lock:
            if self._disk is not None and self._unwritten < UNWRITTEN:
                self._unwritten += len(piece.data)
                self._writer.submit(self._write, self._disk, wanted, piece)
            if wanted in self._ranges and wanted not in self._sizes:
                self._hold(wanted, piece)
        return piece

    def _write(self, disk: DiskCache, wanted: ByteRange, piece: FetchedBytes) -> None:
        disk.put(self._store, *wanted, piece)
        with self._lock:
            self._unwritten -= len(piece.data)

    def _cancel(self, failure: Unreachable | None) -> None:
        """Cancel the requests that are not answered yet."""
        with self._lock:
            self._failure = failure
            for waiting in [r for r in self._ranges if r not in self._sizes]:
                self._ranges[waiting].cancel()
                self._drop(waiting)

    def _hold(self, wanted: ByteRange, piece: FetchedBytes) -> None:
        """Count a range that has arrived, and drop the least recently read ones. The caller holds
        the lock."""
        self._sizes[wanted] = len(piece.data)
        self._bytes += len(piece.data)
        for old in list(self._ranges) if self._bytes > MEMORY else ():
            if self._bytes <= MEMORY:
                break
            if old in self._sizes and (old not in self._unread or self._bytes > 2 * MEMORY):
                self._drop(old)

    def _drop(self, old: ByteRange) -> None:
        """Release the memory of a range. The caller holds the lock."""
        self._ranges.pop(old, None)
        self._unread.discard(old)
        self._bytes -= self._sizes.pop(old, 0)

    def release(self, done: ByteRange) -> None:
        """Release the memory of a range that will not be read again soon."""
        with self._lock:
            self._drop(done)

    def forget(self, *names: str) -> None:
        """Drop all ranges of objects, so that they are fetched again."""
        with self._lock:
            for byte_range in [r for r in self._ranges if r.name in names]:
                self._drop(byte_range)
        if self._disk is not None:
            try:
                # In the thread of the writes, so that ranges that wait for it are removed, too.
                self._writer.submit(self._disk.forget, self._store, *names).result()
            except OSError:  # a damaged entry that stays would be read again and again
                with self._lock:
                    self._disk = None

    def close(self) -> None:
        """Release the memory, cancel requests, and wait until the disk cache has stored what
        arrived."""
        self._cancel(None)
        with self._lock:
            for byte_range in list(self._ranges):
                self._drop(byte_range)
        if self._disk is not None:
            # The thread is not shut down, because a closed source may be read again.
            self._writer.submit(lambda: None).result()


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
