"""Reads and writes the files of a Zarr store: in a local folder, or behind a URL.

Names are relative to the store. Methods raise FileNotFoundError if a file is missing, and
Unreachable if a network fails. Both classes here, and `Bucket`, have methods of the same names.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from zarr.core.sync import sync

from teachonce.store.containers.bucket import Bucket, is_bucket
from teachonce.store.containers.disk_cache import FetchedBytes
from teachonce.store.containers.network import ABSENT, RangeIgnored, Retrier, check_body_length
from teachonce.store.containers.untrusted import MAX_JSON, Folder
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import part_number, part_of
from teachonce.support.errors import UserError, first_line
from teachonce.support.hub_client import bound_hub_client

Result = TypeVar("Result")
CHUNK = 2**16
SMALL = 2**20  # bytes; most metadata files are smaller


class LocalFiles:
    """Reads a local folder's files. Raises StoreError for anything but ordinary files in it."""

    def __init__(self, path: str) -> None:
        # Strings: a pathlib.Path for each file took a fifth of the time to open a small array.
        self._root, self._folder = path, Folder(path)

    def read(self, name: str) -> bytes:
        """Read a whole file. Raises StoreError if it is larger than MAX_JSON bytes."""
        self._folder.check(name, MAX_JSON)
        with open(f"{self._root}/{name}", "rb", buffering=0) as file:
            return file.read()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        self._folder.check(name)
        return os.stat(f"{self._root}/{name}").st_size

    def members(self, group: str) -> list[str]:
        """Return the names directly under a folder."""
        self._folder.enter(group)
        return os.listdir(f"{self._root}/{group}")

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        """Return the names of all files under a group, except the files of `parts`. A link to a
        folder counts as a file."""
        paths = set[str]()
        with suppress(StoreError):  # a link out of the store is not followed
            self._folder.enter(group)
            for folder, names, files in os.walk(os.path.join(self._root, group)):
                relative = Path(folder).relative_to(self._root)
                if relative == Path("parts"):
                    names[:] = [name for name in names if part_number(name) not in parts]
                links = [name for name in names if os.path.islink(os.path.join(folder, name))]
                paths.update((relative / name).as_posix() for name in [*files, *links])
        return paths


class FsspecFiles:
    """Reads and writes the files behind a URL with fsspec."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        # Otherwise huggingface_hub reads responses of any size, and waits for any time.
        if url.startswith("hf://"):
            bound_hub_client()
        # The file system is asynchronous, so that its coroutines run in the loop of zarr-python.
        fs, path = url_to_fs(url, **{"asynchronous": True, **(options or {})})
        self._fs = fs if fs.async_impl else AsyncFileSystemWrapper(fs, asynchronous=True)
        if hasattr(self._fs, "retries"):
            # Retries of the client would take their time from the timeout of a single answer.
            self._fs.retries = 1
        self.retrier, self._root = Retrier(url), str(self._fs._strip_protocol(path)).rstrip("/")
        self._sizes: dict[str, int] = {}

    def _send(
        self, name: str, request: Callable[[str], Awaitable[Result]], size: int | None = 0
    ) -> Result:
        address = f"{self._root}/{name}".rstrip("/")
        return sync(self.retrier.send(name or "its files", lambda: request(address), size))

    async def fetch(self, name: str, begin: int, end: int) -> FetchedBytes:
        """Read a range, without retries; see
        `teachonce.store.containers.remote_ranges.RangeFetcher`."""
        address = f"{self._root}/{name}"
        if begin <= 0 or name not in self._sizes:  # the first range of a file that is opened
            self._sizes[name] = int(await self._fs._size(address) or 0)
        size = self._sizes[name]
        low, high = (max(0, size + begin), size) if begin < 0 else (begin, min(end, size))
        data = await self._range(address, low, high)
        if len(data) > high - low:
            raise RangeIgnored("the server ignores Range and sends whole objects")
        check_body_length(name, data, high - low, size)
        return FetchedBytes(np.frombuffer(data, np.uint8), size, set())

    async def _range(self, address: str, begin: int, end: int) -> bytes:
        """Read a range of a file. If a web server sends more than the range, return one byte
        more."""
        # HTTP cannot express an empty range.
        if begin == end or not address.startswith(("http://", "https://")):
            content: bytes = await self._fs._cat_file(address, start=begin, end=end)
            return content
        # fsspec's own _cat_file reads an answer of any length: an endless one took all memory.
        session, most = await self._fs.set_session(), end - begin + 1
        # `identity` is needed because the range of a compressed response counts compressed bytes.
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        extra = {**self._fs.kwargs, "headers": {**self._fs.kwargs.get("headers", {}), **headers}}
        data = bytearray()
        async with session.get(self._fs.encode_url(address), **extra) as answer:
            self._fs._raise_not_found_for_status(answer, address)
            async for block in answer.content.iter_chunked(CHUNK):
                data += block[: most - len(data)]
                if len(data) == most:
                    answer.close()
                    break
        return bytes(data)

    def read(self, name: str) -> bytes:
        # A single request, instead of one for the size first.
        data = self._send(name, lambda address: self._range(address, 0, MAX_JSON + 1), SMALL)
        if len(data) > MAX_JSON:
            raise StoreError(f"{self.retrier.url}: {name} is larger than {MAX_JSON:,} bytes")
        return data

    def size(self, name: str) -> int:
        return int(self._send(name, self._fs._size) or 0)

    def members(self, group: str) -> list[str]:
        paths = self._send(group, lambda address: self._fs._ls(address, detail=False), None)
        self._fs.invalidate_cache()  # else fsspec would take later sizes from this listing
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        try:
            paths = self._send(group, self._fs._find, None)
            self._fs.invalidate_cache()
        except ABSENT:
            return set()
        names = (str(path)[len(self._root) :].lstrip("/") for path in paths)
        return {name for name in names if part_of(name) not in parts}

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""

        async def request(address: str) -> None:
            # file:// and sftp:// have folders; object stores ignore this.
            await self._fs._makedirs(address.rpartition("/")[0], exist_ok=True)
            await self._fs._pipe_file(address, data)

        self._send(name, request, None)


RemoteFiles = Bucket | FsspecFiles
Files = LocalFiles | RemoteFiles


def remote_files(url: str, options: dict[str, Any] | None) -> RemoteFiles:
    """Make the client of a URL: obstore for a bucket, else fsspec. Sends no request.

    Raises StoreError for a URL that cannot be opened.
    """
    # With obstore a small request is five times as fast as with s3fs, and takes a fifth of the CPU
    # time. obstore also has the same conditional writes for all buckets (RESULTS, "Clients of
    # buckets").
    if is_bucket(url):
        return Bucket(url, options)
    try:
        return FsspecFiles(url, options)
    except UserError:
        raise
    except Exception as error:  # every file system raises its own
        missing = isinstance(error, ImportError)
        remedy = "install what is missing with pip" if missing else "check the address"
        raise StoreError(f"{url}: cannot be opened ({first_line(error)}); {remedy}") from error
