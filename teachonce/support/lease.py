"""Leases: small files by which only one process writes a store, a part or a student. The file is
next to what is written, and the writer updates it regularly.

`.<name>.lease` names the writer as JSON: host, process, a random token. Its modification time is
the last heartbeat, by the clock of the file system that all hosts share. On the writer's machine, a
lock on the file or else the process number shows at once whether the writer is alive. On other
machines only missing heartbeats show this, because a file server may hold the lock of a machine
that has died.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from teachonce.support import files
from teachonce.support.errors import UserError

BEAT, MISSED = 20.0, 3  # seconds between heartbeats; missed heartbeats of a dead writer
SETTLE = 1.0  # seconds to wait after a takeover, as two processes may take over at once
SIZE = 1024  # bytes of a lease: written in one call, so no reader sees half of it
TRIES = 100  # tries to open or create a lease that other processes create and remove
_leases: dict[Path, Lease] = {}  # leases of this process, which may open a store for writing again


class Taken(UserError):
    """Raised if a living process holds the lease."""


class Lease:
    """Holds this process's lease to write a store, part or student, until `close` or the process
    ends.

    Raises Taken if a living process holds the lease, OSError if nothing can be written.
    """

    def __init__(self, store: Path) -> None:
        self.store, self.path, self.token = store, lease_path(store), secrets.token_hex(8)
        if (before := _leases.get(self.path)) is not None:
            before.close()
        self._file, new = self._take()
        try:
            if not new:
                certain = _dead(store, self._file)
                # If two processes take over at once, the later signature remains, and after the
                # pause `check` stops the process of the earlier one.
                self._sign(self._file)
                time.sleep(0 if certain else SETTLE)
            self.check()
            # Remove files of processes that were killed in `_make`.
            files.discard(self.path.parent, f"{self.path.name}-")
        except BaseException:
            os.close(self._file)
            if new:
                self.path.unlink(missing_ok=True)
            raise
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()
        _leases[self.path] = self

    def _take(self) -> tuple[int, bool]:
        """Take the lease; return its open file, and whether the file is new."""
        for _ in range(TRIES):
            if (file := self._make()) is not None:
                return file, True
            with contextlib.suppress(FileNotFoundError):  # its holder has just released it
                return _open(self.path), False
        raise UserError(
            f"{self.store}: another program repeatedly deletes and creates the lease"
            f" {self.path.name} next to it; stop that program, and run the same command again"
        )

    def _make(self) -> int | None:
        """Create a lease file, which is locked and signed before it is linked to its name. Returns
        the open file; None if a lease exists."""
        # First under another name: under the final name, other processes could read it before it is
        # signed.
        new = self.path.with_name(f"{self.path.name}-{self.token}")
        try:
            file = self._create(new)
        except OSError as error:
            error.filename = str(self.path.parent)
            raise
        try:
            # A link, not a rename, which would replace the lease of another process.
            os.link(new, self.path)
            return file
        except (FileExistsError, FileNotFoundError):
            # Another process has the name; or it discarded `new` as a file of a killed process.
            os.close(file)
            return None
        except OSError:  # a file system without links
            os.close(file)
            # With O_EXCL only one process can create it, but others may see it before it is signed.
            with contextlib.suppress(FileExistsError):
                return self._create(self.path)
            return None
        finally:
            new.unlink(missing_ok=True)

    def _create(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            files.lock(file, wait=True)
            self._sign(file)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file

    def _sign(self, file: int) -> None:
        os.pwrite(file, lease_bytes(self.token), 0)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):  # `check` reports what became of the lease
                # Without times, so that a file server sets the time by its own clock.
                os.utime(self._file)

    def check(self) -> None:
        """Raise UserError if another process has taken the lease over, or the file was removed."""
        check_token(self.store, self.path.name, _read(self.path), self.token)

    def close(self) -> None:
        """Release the lease, so that other processes can write; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        # Before the file is closed: the system may give its number to another file, whose time the
        # thread would change.
        self._beating.join()
        # After a takeover the file is the lease of the other process. Closed last: without the
        # lock, another process could sign it after the comparison, and `unlink` would remove it.
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        _leases.pop(self.path, None)


def lease_path(store: Path) -> Path:
    # Resolved, so that two paths to one store have the same lease.
    return (path := store.resolve()).parent / f".{path.name}.lease"


def check_free(store: Path) -> None:
    """Raise Taken if a living process other than this one writes the store."""
    if lease_path(store) in _leases:
        return
    try:
        file = _open(lease_path(store))
    except FileNotFoundError:
        return
    try:
        _dead(store, file)
    finally:
        os.close(file)


def _open(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a lease. Raises UserError for a link or a device, because its target would be
    overwritten."""
    try:
        return files.open_ordinary(path, flags)
    except OSError as error:
        if error.strerror != files.NOT_ORDINARY and error.errno != errno.EISDIR:
            raise
        raise UserError(f"{path}: is not a lease but a link, folder or device; remove it") from None


def _dead(store: Path, file: int) -> bool:
    """Raise Taken if the writer of a lease seems alive. Return True if it certainly died, False if
    only its heartbeats have stopped."""
    locked, writer, current = files.lock(file, wait=False), _read(lease_path(store)), _process(0)
    with tempfile.TemporaryFile(dir=store.resolve().parent) as probe:  # timed by the same clock
        silent = os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime
    if silent < -BEAT:  # a clock was set back: silence counts from now
        os.utime(file)
    heard = alive = silent < BEAT * MISSED
    if writer.get("boot") == current["boot"]:
        if locked:  # the kernel releases the lock of a process that has ended
            return True
        alive = heard or locked is False
        # If the writer has ended, a process that takes the lease over or a forked child holds the
        # lock: heartbeats decide.
        if (runs := is_running(writer)) is not None:
            alive = runs or (heard and locked is False)
    if alive:
        raise taken_error(store, writer, silent)
    return False


def lease_bytes(token: str) -> bytes:
    """Return the content of a lease of this process: SIZE bytes of JSON."""
    return json.dumps({"token": token, **_process(os.getpid())}).ljust(SIZE).encode()


def check_token(store: object, name: str, writer: Mapping[str, Any], token: str) -> None:
    """Raise UserError unless `writer`, the content of the lease `name` of a store, has this token.

    writer: empty if the lease was removed.
    """
    if not writer:
        raise UserError(
            f"{store}: its lease {name} was removed, so this process may not write the store any"
            " more; run the same command again"
        )
    if writer.get("token") != token:
        raise UserError(
            f"{store}: {_named(writer)} has taken over its lease, because this process sent no"
            " heartbeat for too long; published parts are not lost"
        )


def taken_error(store: object, writer: Mapping[str, Any], silent: float) -> Taken:
    """Return the error for a store whose writer is alive; its last heartbeat was `silent` seconds
    ago."""
    return Taken(
        f"{store}: another process is writing it: {_named(writer)}, last heartbeat"
        f" {max(0, silent):.0f} s ago; wait for it or stop it. If it died on another machine, its"
        f" lease expires after {BEAT * MISSED:.0f} s"
    )


def is_running(writer: Mapping[str, Any]) -> bool | None:
    """Return whether the process named in a lease is running; None if it is on another machine."""
    current = _process(0)
    # In another PID namespace, such as a container's, the number may be another process.
    if any(writer.get(key) != current[key] for key in ("boot", "namespace")):
        return None
    return bool(writer.get("begun") == _process(writer.get("pid"))["begun"])


def _process(pid: object) -> dict[str, Any]:
    """Return the fields of a lease for process `pid` of this machine; `begun` is None if the
    process has ended."""
    # The start time distinguishes processes: the kernel reuses their numbers.
    host, namespace, started = socket.gethostname(), None, None
    boot = host
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Machines may have the same host name, and a restart reuses the process numbers.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        # Field 22 of proc(5). The name in field 2 may contain spaces and brackets.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    fields = {"host": host, "boot": boot, "namespace": namespace, "pid": pid, "begun": started}
    return {**fields, "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def _read(path: Path) -> dict[str, Any]:
    """Read a lease; return {} if it is missing or cannot be parsed."""
    try:
        with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
            return parse_lease(file.read(SIZE))
    except FileNotFoundError:
        return {}


def parse_lease(data: bytes) -> dict[str, Any]:
    """Parse the bytes of a lease; return {} if they are not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        writer = json.loads(data)
        return writer if isinstance(writer, dict) else {}
    return {}


def _named(writer: Mapping[str, Any]) -> str:
    pid, host, since = (writer.get(key, "?") for key in ("pid", "host", "since"))
    return f"process {pid} on {host} since {since}"
