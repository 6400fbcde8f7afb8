"""One writer for each store or student: a lease, a small file beside it, kept fresh by the writer.

`.<name>.lease` names the writer as JSON: host, process, a random token. Its modification time is
the last heartbeat, by the clock of the file system that all hosts share. On the writer's machine a
lock on the file, else the process number, tells at once whether it lives; elsewhere only silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store import disk
from store.errors import StoreError

BEAT, MISSED = 20.0, 3  # seconds between heartbeats; so many missed, and the writer counts as dead
SETTLE = 1.0  # seconds in which somebody else may take over the lease of the same silent writer
SIZE = 1024  # of a lease: written at once, it is never seen half
_own: dict[Path, Lease] = {}  # of this process, which may begin a store anew


class Lease:
    """The right of this process to write one store or student, until `close` or its death.

    Raises StoreError if a living process has it, OSError where nothing can be written.
    """

    def __init__(self, store: Path) -> None:
        self.store, self.path, self.token = store, lease_path(store), secrets.token_hex(8)
        if (before := _own.get(self.path)) is not None:
            before.close()
        try:
            self._file, new = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            self._file, new = os.open(self.path, os.O_RDWR), False
        try:
            certain = disk.lock(self._file, wait=True) if new else _dead(store, self._file)
            writer = {"token": self.token, **_process(os.getpid())}
            os.pwrite(self._file, json.dumps(writer).ljust(SIZE).encode(), 0)
            if not (new or certain):
                time.sleep(SETTLE)
            self.check()
        except BaseException:
            os.close(self._file)
            if new:
                self.path.unlink(missing_ok=True)
            raise
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()
        _own[self.path] = self

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):  # `check` tells what became of the lease
                os.utime(self._file)

    def check(self) -> None:
        """StoreError if another process has taken the lease over, or somebody has removed it."""
        writer = _read(self.path)
        if not writer:
            raise StoreError(
                f"{self.store}: {self.path.name} beside it was removed, so this process may not"
                " write it any more; start again with the same arguments"
            )
        if writer.get("token") != self.token:
            raise StoreError(
                f"{self.store}: {_named(writer)} has taken over the right to write it, as this"
                " process was silent for too long; published parts are kept"
            )

    def close(self) -> None:
        """Let others write; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._beating.join()
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        _own.pop(self.path, None)


def lease_path(store: Path) -> Path:
    """Where the lease of a store lies."""
    return (whole := store.resolve()).parent / f".{whole.name}.lease"


def check_free(store: Path) -> None:
    """StoreError if a living process other than this one writes the store."""
    if lease_path(store) not in _own and lease_path(store).exists():
        with lease_path(store).open("r+b") as file:
            _dead(store, file.fileno())


def _dead(store: Path, file: int) -> bool:
    """StoreError if the lease's writer lives; else whether nobody else can find it dead, too."""
    locked, writer, here = disk.lock(file, wait=False), _read(lease_path(store)), _process(0)
    with tempfile.TemporaryFile(dir=store.resolve().parent) as probe:  # timed by the same clock
        silent = os.fstat(probe.fileno()).st_mtime - os.fstat(file).st_mtime
    alive = silent < BEAT * MISSED
    if locked is False:
        alive = True
    elif writer.get("boot") == here["boot"]:
        if locked:
            return True
        if writer["namespace"] == here["namespace"]:
            alive = writer["begun"] == _process(writer["pid"])["begun"]
    if alive:
        raise StoreError(
            f"{store}: another process is writing it: {_named(writer)}, last heard of"
            f" {silent:.0f} s ago; wait for it or stop it. Dead on another machine, it is replaced"
            f" after {BEAT * MISSED:.0f} s"
        )
    return False


def _process(pid: int) -> dict[str, Any]:
    """A process of this machine; `begun` tells apart those of one number, None if it is gone."""
    host, namespace, begun = socket.gethostname(), None, None
    boot = host
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        begun = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    known = {"host": host, "boot": boot, "namespace": namespace, "pid": pid, "begun": begun}
    return {**known, "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def _read(path: Path) -> dict[str, Any]:
    """What a lease says; empty if it says nothing."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        writer = json.loads(path.read_bytes())
        return writer if isinstance(writer, dict) else {}
    return {}


def _named(writer: dict[str, Any]) -> str:
    pid, host, since = (writer.get(key, "?") for key in ("pid", "host", "since"))
    return f"process {pid} on {host} since {since}"
