"""Reads and writes the objects in a bucket (S3, Google Cloud Storage, Azure) with obstore.

Each method sends a request through a `Retrier`. A conditional write takes effect only if the object
is unchanged, or does not exist yet; `put_if` raises NotImplementedError if the server does not
support conditions.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from zarr.core.sync import sync

from teachonce.store.containers.disk_cache import FetchedBytes
from teachonce.store.containers.network import (
    ABSENT,
    CREDENTIALS,
    RangeIgnored,
    Retrier,
    WrongLength,
    check_body_length,
    http_answer,
)
from teachonce.store.containers.untrusted import MAX_JSON
from teachonce.store.errors import StoreError, Unreachable
from teachonce.store.format.layout import part_of
from teachonce.support.errors import first_line
from teachonce.support.packages import library

Result = TypeVar("Result")
SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
SUFFIXES = ("s3", "s3a", "gs")  # these serve a range counted from the end of an object
EXTRA = "s3"
AT_ONCE = 16  # concurrent requests
MULTIPART = 2**32  # bytes; S3 accepts no larger object in one request, and one request is atomic
OF_S3FS = {  # names of `storage_options` in s3fs, which users of pandas know
    "endpoint_url": "endpoint",
    "region_name": "region",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "token",
    "anon": "skip_signature",
}
OTHER_RANGE = re.compile(r"Requested (\S+), got (\S+)")  # in the message on another range
IGNORED = ("NotPartial", "RangeNotSupported")  # in obstore's message if Range is ignored
HELD = {"AlreadyExistsError", "PreconditionError"}
UNCONDITIONAL = {"NotSupportedError", "NotImplementedError"}
# Without a pause, 11 of 50 commands that ended at once after an answer were aborted (SIGABRT): a
# thread of obstore that releases its Python objects while the interpreter ends is killed
# (PyO3/pyo3-async-runtimes issue 40).
PAUSE_AT_EXIT = 0.1  # seconds


def is_bucket(path: object) -> bool:
    """Return whether a path is the URL of a store in a bucket (s3://, gs://, az://)."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme in SCHEMES


@cache
def _pause_at_exit() -> None:
    """Register a pause at exit, once in a process, in which the threads of obstore can end."""
    atexit.register(time.sleep, PAUSE_AT_EXIT)


class Tagged(NamedTuple):
    """Holds an object that was read: its bytes, its ETag, and its modification time by the server's
    clock."""

    data: bytes
    tag: str
    modified: datetime


class Bucket:
    """Reads and writes objects below a URL, `s3://bucket/a/b`; names are relative to it.

    Raises Unreachable if no answer comes or a request is refused, FileNotFoundError for a missing
    object, UserError if obstore is not installed.
    """

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.retrier = url, Retrier(url)
        self._obstore = library("obstore", EXTRA, f"{url.partition('://')[0]}://")
        _pause_at_exit()
        self.store = _client(url, options)
        self._suffixes = url.partition("://")[0] in SUFFIXES

    def send(
        self, target: str, request: Callable[[], Awaitable[Result]], size: int | None = 0
    ) -> Result:
        """Send a request, and retry it until the server answers; see `Retrier.send`."""
        return sync(self.retrier.send(target or "its objects", request, size))

    def read(self, name: str) -> bytes:
        """Read an object of at most MAX_JSON bytes. Raises StoreError if it is larger."""
        return self._read(name).data

    def _read(self, name: str) -> Tagged:
        async def request() -> Tagged:
            response = await self._obstore.get_async(self.store, name)
            meta = response.meta
            # The size comes before the body, so a huge object is refused before it takes memory.
            if meta["size"] > MAX_JSON:
                raise StoreError(f"{self.url}: {name} is larger than {MAX_JSON:,} bytes")
            data = bytes(await response.bytes_async())
            return Tagged(data, str(meta["e_tag"]), meta["last_modified"])

        return self.send(name, request, 2**20)

    async def fetch(self, name: str, begin: int, end: int) -> FetchedBytes:
        """Read a range, without retries; see
        `teachonce.store.containers.remote_ranges.RangeFetcher`."""
        span: Any = {"suffix": -begin} if begin < 0 else (begin, end)
        if begin < 0 and not self._suffixes:
            size = await self._size(name)
            span = (max(0, size + begin), size)
        try:
            response = await self._obstore.get_async(self.store, name, options={"range": span})
        # obstore has no exception class for these cases; it raises before it reads the body.
        except Exception as error:
            # No byte of the range exists: the object is empty, or shorter. That is damage of the
            # store, which the reader of the bytes reports.
            answer = http_answer(error)
            if span == (0, 0) or (answer and answer.status == 416):
                return FetchedBytes(np.empty(0, np.uint8), await self._size(name), set())
            if any(word in str(error) for word in IGNORED):
                raise RangeIgnored("the server ignores Range and sends whole objects") from error
            if match := OTHER_RANGE.search(str(error)):
                raise WrongLength(
                    f"received bytes {match[2]} of {name}, expected {match[1]}"
                ) from error
            raise
        total, (low, high) = int(response.meta["size"]), response.range
        data = await response.bytes_async()
        check_body_length(name, data, high - low, total)
        return FetchedBytes(np.frombuffer(data, np.uint8), total, set())

    def tagged(self, name: str) -> Tagged | None:
        """Read an object with its ETag; return None if it is missing."""
        try:
            return self._read(name)
        except ABSENT:
            return None

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        return self.send(name, lambda: self._size(name))

    async def _size(self, name: str) -> int:
        return int((await self._obstore.head_async(self.store, name))["size"])

    def has_all(self, names: Iterable[str]) -> list[bool]:
        """Return for each name whether the object exists, by concurrent requests."""

        async def exists(name: str) -> bool:
            try:
                await self.retrier.send(name, lambda: self._size(name))
            except ABSENT:
                return False
            return True

        return self._many(exists, names)

    def _many(self, call: Callable[[Any], Awaitable[Result]], items: Iterable[Any]) -> list[Result]:
        """Await `call` for every item, AT_ONCE at a time; return the results in order."""

        async def every() -> list[Result]:
            slots = asyncio.Semaphore(AT_ONCE)

            async def placed(item: Any) -> Result:
                async with slots:
                    return await call(item)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(placed(item)) for item in items]
            return [task.result() for task in tasks]

        try:
            return sync(every())
        except BaseExceptionGroup as group:
            # Callers do not catch exception groups, so only the first error is raised.
            raise group.exceptions[0] from None

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object."""
        self.send(name, lambda: self._put(name, data), len(data))

    async def _put(self, name: str, data: bytes, **conditions: Any) -> Any:
        multipart = len(data) > MULTIPART
        return await self._obstore.put_async(
            self.store, name, data, use_multipart=multipart, **conditions
        )

    def put_files(self, files: Mapping[str, Path]) -> None:
        """Write objects, by name, from local files, concurrently and in no order."""

        async def put_file(item: tuple[str, Path]) -> None:
            name, file = item
            # A file is read when its request may start: at most AT_ONCE files are in memory.
            # A thread reads it, because zarr-python uses the same loop.
            data = await asyncio.to_thread(file.read_bytes)
            await self.retrier.send(name, lambda: self._put(name, data), len(data))

        self._many(put_file, files.items())

    def put_if(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Write an object if its ETag is still `tag` or, if `tag` is None, if it does not exist.

        Returns the new ETag, or None if the condition is false. `data` must differ from what any
        other process writes. Raises NotImplementedError if the server does not support conditions.
        """
        mode = "create" if tag is None else {"e_tag": tag}
        try:
            result = self.send(name, lambda: self._put(name, data, mode=mode), len(data))
            return str(result["e_tag"])
        except (Unreachable, *ABSENT) as error:
            if isinstance(error, ABSENT):  # the object that had this tag was removed
                return None
            kind = type(error.__cause__).__name__
            answer = http_answer(error.__cause__) if error.__cause__ else None
            if kind in UNCONDITIONAL or (answer and answer.status == 501):
                raise NotImplementedError from error
            # 412 is a false condition; S3 answers 409 while another conditional write is under way.
            if kind not in HELD and not (answer and answer.status in (409, 412)):
                raise
        # The answer to an earlier try may have been lost after its write: compare the bytes.
        stored = self.tagged(name)
        return stored.tag if stored and stored.data == data else None

    def names(self, prefix: str = "") -> list[str]:
        """Return the names directly under a prefix: objects and deeper prefixes."""
        listing = self._obstore.list_with_delimiter_async
        # No timeout (None): a listing sends one request for each page of names.
        result = self.send(prefix, lambda: listing(self.store, prefix or None), None)
        paths = [*result["common_prefixes"], *(entry["path"] for entry in result["objects"])]
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def members(self, group: str) -> list[str]:
        """Return the names directly under a group; under `parts` only published parts."""
        names = self.names(group)
        if group != "parts":
            return names
        published = self.has_all(f"{group}/{name}/zarr.json" for name in names)
        return [name for name, done in zip(names, published, strict=True) if done]

    def under(self, group: str = "", parts: Container[int] = ()) -> set[str]:
        """Return the names of all objects under a group, except the objects of `parts`."""

        async def request() -> set[str]:
            paths = set[str]()
            async for page in self._obstore.list(self.store, group or None):
                paths.update(str(entry["path"]) for entry in page)
            return {path for path in paths if part_of(path) not in parts}

        return self.send(group, request, None)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""

        async def delete_one(name: str) -> None:
            with suppress(*ABSENT):
                await self.retrier.send(name, lambda: self._obstore.delete_async(self.store, name))

        self._many(delete_one, names)


def _client(url: str, options: dict[str, Any] | None) -> Any:
    """Make obstore's client for a URL; sends no request. Raises StoreError for unknown options,
    Unreachable if there are no credentials."""
    from obstore.store import from_url

    given = dict(options or {})
    # s3fs expects the endpoint inside `client_kwargs`, so users of pandas pass it there.
    given.update(given.pop("client_kwargs", None) or {})
    config = {OF_S3FS.get(key, key): value for key, value in given.items()}
    credentials = _provided(url, config) if url.startswith(("s3://", "s3a://")) else {}
    try:
        return from_url(
            url,
            config=config or None,  # type: ignore[call-overload]
            # By default obstore refuses addresses without TLS, and ends each request after 30 s,
            # too early for a large object. `Retrier` has the timeouts and the retries.
            client_options={"allow_http": True, "timeout": "6h", "connect_timeout": "20s"},
            retry_config={"max_retries": 0},
            **credentials,
        )
    except Exception as error:  # obstore raises a type of its own for each cause
        raise StoreError(f"{url}: cannot be opened ({first_line(error)})") from error


def _provided(url: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument `credential_provider` with boto3's credentials (profiles, sign-on
    services); {} if `config` or the environment has credentials, or boto3 is missing.

    Raises Unreachable if boto3 finds none.
    """
    environment = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    keys = ("access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature")
    if any(os.environ.get(name) for name in environment) or any(config.get(key) for key in keys):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:  # without boto3, obstore itself looks for the machine's credentials
        return {}
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as error:  # an unreadable profile, an expired sign-on
        # A ValueError means that boto3 found no credentials, which the message states anyway.
        cause = "" if isinstance(error, ValueError) else f" ({first_line(error)})"
        raise Unreachable(
            f"{url}: cannot be reached: no credentials{cause}; check {CREDENTIALS}"
        ) from error
