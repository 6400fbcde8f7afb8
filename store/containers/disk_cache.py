"""A bounded cache, on a local disk, of byte ranges of remote stores. Any number of processes share
it.

An entry is a file: the bytes of a range, the size of the whole object, and a checksum. The file's
modification time is the time of its last use. A process that writes or removes entries holds a lock
on the file `lock`. So a temporary file that is found under the lock was left by a killed process.
The file `lock` also holds the number of bytes used. Bytes are added before they are written and
subtracted after they are removed: even after a kill, all writers together stay within the limit.
Each eviction counts the bytes of all files again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from teachonce.store.containers.blosc import Bytes
from teachonce.store.containers.cache_option import PREFIX
from teachonce.support import files
from teachonce.support.errors import UserError

END = struct.Struct("<4sIQ")  # end of an entry: MARK, CRC-32C of the data, size of the object
MARK = b"TPC1"
TOTAL = struct.Struct("<Q")
ENTRY = re.compile(r"[0-9a-f]{32}\.-?\d+\.\d+")
UNIT = 4096  # bytes; file systems allocate whole blocks of about this size
# Share of the bound to which an eviction empties the cache. Each eviction lists all entries, so a
# higher share, which makes evictions more frequent, would slow writing.
FILL_AFTER_CLEANUP = 0.9


def _entry_prefix(store: str, name: str) -> str:
    """Return the prefix, in hexadecimal, of the names of an object's entries."""
    # Names of objects have slashes, so they are hashed. `store` is the checksum of the store: a
    # store that is written again at the same address has other entries.
    return hashlib.sha256(f"{store}/{name}".encode()).hexdigest()[:32]


class FetchedBytes(NamedTuple):
    """Holds bytes of an object, the size of the whole object, and the numbers of the chunks in
    these bytes whose checksum a reader has compared."""

    data: Bytes
    whole: int
    sound: set[int]


def taken_by(size: int) -> int:
    """Return the number of bytes that a file takes on a disk."""
    return -(-size // UNIT) * UNIT


@dataclass
class _BytesTaken:
    """Counts the bytes that the cache uses; the file `lock` stores the number."""

    file: int
    bytes: int

    def add(self, size: int) -> None:
        """Add `size`, which may be negative, to the number of bytes. Raises OSError."""
        self.bytes = max(0, self.bytes + size)
        os.pwrite(self.file, TOTAL.pack(self.bytes), 0)


class DiskCache:
    """Stores entries in a folder, at most `bound` bytes on the disk. If `bound` is 0, entries are
    neither added nor evicted. Files that are not named like entries are ignored.

    Raises UserError if the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self.folder, self.bound = folder, bound
        self.full = False  # a write has failed: nothing more is written
        self._warned = False  # a range larger than the bound was logged
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._counted() as usage:
                # An earlier run may have filled the folder up to a larger bound.
                self._make_room(usage, bound or None)
        except OSError as error:
            raise UserError(
                f"--cache {PREFIX}{folder}: cannot be written: {files.reason(error)}"
            ) from error

    @property
    def word(self) -> str:
        """Return the cache as a value of `--cache`, which `parse_disk_cache` parses."""
        return f"{PREFIX}{self.folder},{self.bound}"

    @contextmanager
    def _counted(self) -> Iterator[_BytesTaken]:
        """Hold the lock inside the `with` block, and yield the number of bytes used. Raises
        OSError."""
        # flock belongs to an open file, so a file that each use opens excludes threads, too.
        file = files.open_ordinary(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if files.lock(file, wait=True) is None:
                raise OSError("its file system has no locks (a local disk has them)")
            try:
                data = os.pread(file, TOTAL.size, 0)
                usage = _BytesTaken(file, TOTAL.unpack(data)[0] if len(data) == TOTAL.size else 0)
                if len(data) != TOTAL.size:
                    self._make_room(usage, None)
                yield usage
            finally:
                # Closing would not unlock: a process forked meanwhile holds the file open, too.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def _make_room(self, usage: _BytesTaken, most: int | None) -> None:
        """Remove temporary files of killed processes, and the least recently used entries until the
        cache has at most `most` bytes. Set `usage` to the bytes that remain."""
        entries, total = [], 0
        with os.scandir(self.folder) as listed:
            for entry in listed:
                if entry.name.startswith(files.UNFINISHED):
                    os.unlink(entry.path)
                elif ENTRY.fullmatch(entry.name):
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, taken_by(status.st_size), entry.path))
                    total += entries[-1][1]
        for _, size, path in sorted(entries):
            if most is None or total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        usage.add(total - usage.bytes)

    def _path(self, store: str, name: str, begin: int, end: int) -> Path:
        return self.folder / f"{_entry_prefix(store, name)}.{begin}.{end}"

    def announced(self, store: str, name: str, begin: int, end: int) -> bool:
        """Return whether the cache has this entry, sound or damaged, and start reading it from the
        disk."""
        try:
            file = files.open_ordinary(self._path(store, name, begin, end))
        except OSError:
            return False
        if hasattr(os, "posix_fadvise"):  # macOS lacks it, and reading ahead is optional
            with suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)  # to the end
        os.close(file)
        return True

    def get(self, store: str, name: str, begin: int, end: int) -> FetchedBytes | None:
        """Read an entry; return None if it is missing or damaged. `store` is the checksum of the
        store. A damaged entry is removed."""
        path = self._path(store, name, begin, end)
        try:
            with os.fdopen(files.open_ordinary(path), "rb") as file:
                # A map would hold the disk space of an entry that is removed meanwhile.
                data = np.fromfile(file, np.uint8)
                os.utime(file.fileno())
        except OSError:
            return None
        payload = data[: -END.size]
        if len(data) >= END.size:
            mark, checksum, size = END.unpack(data[-END.size :].tobytes())
            if mark == MARK and google_crc32c.value(payload) == checksum:
                return FetchedBytes(payload, size, set())
        with suppress(OSError):
            self._remove([path])
        return None

    def put(self, store: str, name: str, begin: int, end: int, piece: FetchedBytes) -> None:
        """Write an entry, unless it is larger than the bound, which is logged once. An error of the
        disk is logged once; after it, nothing is written."""
        path = self._path(store, name, begin, end)
        size = taken_by(len(piece.data) + END.size)
        if self.full or not self.bound:
            return
        if size > self.bound:
            if not self._warned:
                self._warned = True
                logging.getLogger(__name__).warning(
                    "--cache %s: %d bytes of %s are not cached, because they are more than the"
                    " whole cache may take; give a larger SIZE", self.word, size, name,
                )  # fmt: skip
            return
        tail = END.pack(MARK, google_crc32c.value(piece.data), piece.whole)
        try:
            with self._counted() as usage:
                if not path.exists() and self._has_room(usage, size):
                    self._write(usage, path, size, (piece.data.data, tail))
        except OSError as error:
            self.full = True
            logging.getLogger(__name__).warning(
                "--cache %s%s: nothing more is cached there: %s; the store is read from its"
                " address", PREFIX, self.folder, files.reason(error),
            )  # fmt: skip

    def _has_room(self, usage: _BytesTaken, size: int) -> bool:
        if usage.bytes + size > self.bound:
            self._make_room(usage, max(0, int(self.bound * FILL_AFTER_CLEANUP) - size))
        return usage.bytes + size <= self.bound

    def _write(
        self, usage: _BytesTaken, path: Path, size: int, data: tuple[memoryview | bytes, ...]
    ) -> None:
        usage.add(size)  # before there is a file: after a kill the count is too high, never too low
        new = path.with_name(f"{files.UNFINISHED}{path.name}-{os.urandom(8).hex()}")
        try:
            with os.fdopen(files.create(new, 0o644), "wb") as opened:
                opened.writelines(data)
            # An entry is not synced: after a crash, its checksum reveals that it is torn.
            os.rename(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            usage.add(-size)
            raise

    def forget(self, store: str, *names: str) -> None:
        """Remove all entries of objects of a store. Raises OSError."""
        named = {_entry_prefix(store, name) for name in names}
        self._remove([path for path in self.folder.iterdir() if path.name[:32] in named])

    def _remove(self, paths: list[Path]) -> None:
        with self._counted() as usage:
            for path in paths:
                with suppress(FileNotFoundError):
                    size = taken_by(path.stat().st_size)
                    path.unlink()
                    usage.add(-size)
