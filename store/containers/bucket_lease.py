"""The lease of a store in a bucket: an object next to the store that its writer rewrites regularly.

It has the content of a lease on a disk (`support/lease.py`). Writes are conditional: they take
effect only if the object is still the one that this process has read. Times are the server's
modification times of objects. Two processes can take the lease at once if the server does not
support conditions. Then the last one holds it, and the first one notices before it writes a part.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from teachonce.store.containers.bucket import Bucket, Tagged
from teachonce.support.errors import UserError
from teachonce.support.lease import (
    BEAT,
    MISSED,
    SETTLE,
    TRIES,
    check_token,
    is_running,
    lease_bytes,
    parse_lease,
    taken_error,
)

NONCE = 16  # random bytes after the content of a lease
# The leases of this process, by URL. The process may create a store again although it has not
# closed its lease of that store.
_leases: dict[str, BucketLease] = {}


class BucketLease:
    """Holds this process's lease to write a store in a bucket, until `close` or the process ends.

    Raises Taken if a living process holds the lease, Unreachable if nothing can be written.
    """

    def __init__(self, url: str) -> None:
        self.url, self.token = url, secrets.token_hex(8)
        self._bucket, self._name = _lease_place(url)
        if (previous := _leases.get(url)) is not None:
            previous.close()
        self._conditional = True
        self._take()
        # Without conditions, another process may have written its own lease during SETTLE.
        self.check()
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()
        _leases[url] = self

    def _sign(self) -> bytes:
        """Return the content of the lease."""
        # Random, so that every write gives another ETag.
        return lease_bytes(self.token) + secrets.token_hex(NONCE // 2).encode()

    def _take(self) -> None:
        for _ in range(TRIES):
            lease = self._bucket.tagged(self._name)
            if lease is not None:
                _check_dead(self.url, self._bucket, self._name, lease)
            try:
                tag = self._bucket.put_if(self._name, self._sign(), lease.tag if lease else None)
                # Some servers accept a conditional write and ignore its condition. A second
                # creation that succeeds proves it, because the content of each write is unique.
                if tag and self._bucket.put_if(self._name, self._sign(), None):
                    raise NotImplementedError
            except NotImplementedError:
                self._conditional = False
                self._bucket.write(self._name, self._sign())
                time.sleep(SETTLE)
                return
            if tag is not None:
                return
        raise UserError(
            f"{self.url}: another program repeatedly deletes and creates the lease {self._name}"
            " next to it; stop that program, and run the same command again"
        )

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with suppress(Exception):  # `check` reports what became of the lease
                self._renew()

    def _renew(self) -> None:
        # The token identifies the owner, not the tag of this process's last write: in an outage a
        # write may arrive although its answer, with the new tag, does not.
        lease = self._held()
        if self._conditional:
            self._bucket.put_if(self._name, self._sign(), lease.tag)
        else:
            self._bucket.write(self._name, self._sign())

    def check(self) -> None:
        """Raise UserError if another process has taken the lease over, or if it was removed."""
        self._held()

    def _held(self) -> Tagged:
        """Return the lease as it is in the bucket. Raises UserError if it is not this process's."""
        lease = self._bucket.tagged(self._name)
        check_token(self.url, self._name, _writer(lease), self.token)
        assert lease is not None  # `check_token` raises if it is None
        return lease

    def close(self) -> None:
        """Release the lease, so that other processes can write; a second call does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        # A heartbeat under way could write the lease again after it is deleted.
        self._beating.join()
        _leases.pop(self.url, None)
        if _writer(self._bucket.tagged(self._name)).get("token") == self.token:
            self._bucket.delete([self._name])


def _writer(lease: Tagged | None) -> dict[str, Any]:
    """Return the content of a lease; {} if it is missing."""
    return parse_lease(lease.data[:-NONCE]) if lease else {}


def _lease_place(url: str) -> tuple[Bucket, str]:
    """Return the folder of a store in its bucket, and the name of its lease there."""
    folder, _, name = url.rpartition("/")
    return Bucket(folder), f".{name}.lease"


def check_free(url: str) -> None:
    """Raise Taken if a living process other than this one writes the store, Unreachable if nothing
    can be written next to it."""
    bucket, name = _lease_place(url)
    lease = None if url in _leases else bucket.tagged(name)
    if lease is None:
        _now(bucket, name)  # fails before the work if nothing can be written
    else:
        _check_dead(url, bucket, name, lease)


def _now(bucket: Bucket, name: str) -> float:
    """Return the time by the server's clock, in seconds: write an object and read its modification
    time."""
    probe = f"{name}-probe"
    bucket.write(probe, b"")
    try:
        written = bucket.tagged(probe)
    finally:
        bucket.delete([probe])
    # The probe is missing if another process has just read the time and deleted it.
    return written.modified.timestamp() if written else _now(bucket, name)


def _check_dead(url: str, bucket: Bucket, name: str, lease: Tagged) -> None:
    """Raise Taken if the writer of a lease lives."""
    writer = _writer(lease)
    silent = _now(bucket, name) - lease.modified.timestamp()
    alive = silent < BEAT * MISSED
    if (runs := is_running(writer)) is not None:
        # An unclosed lease with this process's number has no writer any more if it is not in
        # `_leases`.
        own_pid = writer.get("pid") == os.getpid()
        alive = runs and not (own_pid and url not in _leases)
    if alive:
        raise taken_error(url, writer, silent)
