"""The files of a Zarr store: of a local folder, or behind a URL. Names are relative to the store;
FileNotFoundError stands for what is not there."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Container
from pathlib import Path
from typing import Any, Protocol, TypeVar

from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from teachonce.store.containers.bucket import Bucket, is_bucket
from teachonce.store.containers.disk_cache import Piece, bytes_of
from teachonce.store.containers.network import ABSENT, Line
from teachonce.store.containers.untrusted import MAX_JSON, Folder, files_under
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import part_of

Result = TypeVar("Result")
SMALL = 2**20  # what most metadata are below


class Files(Protocol):
    """Reads the files of a store; raises OSError, and Unreachable where a network fails."""

    store: Store  # the same files for zarr-python

    def read(self, name: str) -> bytes:
        """Read a whole file of at most MAX_JSON bytes. StoreError if it is larger."""

    def size(self, name: str) -> int:
        """The bytes of a file."""

    def members(self, group: str) -> list[str]:
        """Names directly under a folder."""

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        """Names of all files under a group, without those of `parts`."""


class LocalFiles:
    """The files of a folder; what is not an ordinary file inside it raises StoreError."""

    def __init__(self, path: str) -> None:
        self._root, self._folder = Path(path), Folder(path)
        self.store: Store = LocalStore(path, read_only=True)

    def read(self, name: str) -> bytes:
        self._folder.check(name, MAX_JSON)
        return (self._root / name).read_bytes()

    def size(self, name: str) -> int:
        self._folder.check(name)
        return (self._root / name).stat().st_size

    def members(self, group: str) -> list[str]:
        self._folder.enter(group)
        return os.listdir(self._root / group)

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        try:
            self._folder.enter(group)
        except StoreError:  # a link out of the store, which is not followed
            return set()
        return set(files_under(str(self._root), group, parts))


class _Asking(Store):
    """A store of zarr-python that asks again where a network fails."""

    line: Line

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        size = None
        if isinstance(byte_range, RangeByteRequest):
            size = byte_range.end - byte_range.start
        found = await self.fetch(key, prototype, byte_range, size)
        if found is None:  # zarr-python would take zeros for what is not there
            raise StoreError(f"{key} is missing")
        return found

    async def fetch(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None, size: int | None
    ) -> Buffer | None:
        """`get`, where some `size` bytes are expected; None where nobody knows."""
        request: Any = super().get  # type: ignore[safe-super]  # the next class has one
        return await self.line.ask(key, lambda: request(key, prototype, byte_range), size)


class RemoteStore(_Asking, FsspecStore):
    """zarr-python's store behind a URL."""

    @classmethod
    def at(cls, url: str, options: dict[str, Any] | None, writing: bool = False) -> RemoteStore:
        """Choose the client by the URL, and ask nothing yet. Raises ImportError, ValueError."""
        store: Any = cls.from_url(url, storage_options=dict(options or {}), read_only=not writing)
        if hasattr(store.fs, "retries") and "://" in url:
            store.fs.retries = 1
        store.line = Line(url)
        found: RemoteStore = store
        return found


class BucketStore(_Asking, ObjectStore[Any]):
    """zarr-python's store of a bucket."""


class Remote(Files, Protocol):
    """Files over a network, which can be written."""

    line: Line

    async def piece(self, name: str, begin: int, end: int) -> Piece:
        """See `teachonce.store.containers.far.Fetch`."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""


def remote_files(url: str, options: dict[str, Any] | None = None, writing: bool = False) -> Remote:
    """The files behind a URL: of a bucket by obstore, else by fsspec."""
    return BucketFiles(url, options) if is_bucket(url) else RemoteFiles(url, options, writing)


class BucketFiles:
    """The objects of a store in a bucket."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.bucket = Bucket(url, options)
        store = BucketStore(self.bucket.store, read_only=True)
        self.line = store.line = self.bucket.line
        self.store: Store = store

    async def piece(self, name: str, begin: int, end: int) -> Piece:
        return await self.bucket.piece(name, begin, end)

    def read(self, name: str) -> bytes:
        return self.bucket.read(name, MAX_JSON)

    def size(self, name: str) -> int:
        return self.bucket.size(name)

    def has(self, name: str) -> bool:
        """Whether there is such an object; it is read, as an answer without a body tells no
        cause."""
        return self.bucket.tagged(name) is not None

    def members(self, group: str) -> list[str]:
        """Names directly under a group; of the parts those that were published whole."""
        found = self.bucket.folders(group)
        if group != "parts":
            return found
        there = self.bucket.has_all(f"{group}/{name}/zarr.json" for name in found)
        return [name for name, whole in zip(found, there, strict=True) if whole]

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        return self.bucket.names(group, lambda name: part_of(name) in parts)

    def write(self, name: str, data: bytes) -> None:
        self.bucket.put(name, data)


class RemoteFiles:
    """The files behind a URL that fsspec knows."""

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, writing: bool = False
    ) -> None:
        self._remote = RemoteStore.at(url, options, writing)
        self.store: Store = self._remote
        self.line, self._fs = self._remote.line, self._remote.fs
        self._sizes: dict[str, int] = {}
        self._root = self._remote.path.rstrip("/")

    def _ask(
        self, name: str, request: Callable[[str], Awaitable[Result]], size: int | None = 0
    ) -> Result:
        address = f"{self._root}/{name}".rstrip("/")
        return sync(self.line.ask(name or "its files", lambda: request(address), size))

    async def piece(self, name: str, begin: int, end: int) -> Piece:
        address = f"{self._root}/{name}"
        if begin <= 0 or name not in self._sizes:  # the first range of a file that is opened
            self._sizes[name] = int(await self._fs._size(address) or 0)
        whole = self._sizes[name]
        low, high = (max(0, whole + begin), whole) if begin < 0 else (begin, min(end, whole))
        data = await self._fs._cat_file(address, start=low, end=high)
        if len(data) != high - low:
            raise OSError(f"{len(data):,} bytes of {name} came, expected {high - low:,}")
        return Piece(bytes_of(data), whole, set())

    def read(self, name: str) -> bytes:
        asked = RangeByteRequest(0, MAX_JSON + 1)  # bounded, and one answer for size and bytes
        found = sync(self._remote.fetch(name, default_buffer_prototype(), asked, SMALL))
        if found is None:
            raise FileNotFoundError(name)
        if len(found) > MAX_JSON:
            raise StoreError(f"{self.line.url}: {name} is larger than {MAX_JSON:,} bytes")
        return found.to_bytes()

    def size(self, name: str) -> int:
        return int(self._ask(name, self._fs._size) or 0)

    def has(self, name: str) -> bool:
        """Whether there is such a file; it is read, as an answer without a body tells no cause."""
        try:
            self.read(name)
        except ABSENT:
            return False
        return True

    def members(self, group: str) -> list[str]:
        found = self._ask(group, lambda address: self._fs._ls(address, detail=False), None)
        self._fs.invalidate_cache()  # or sizes would be taken from it later
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def under(self, group: str, parts: Container[int] = ()) -> set[str]:
        try:
            found = self._ask(group, self._fs._find, None)
            self._fs.invalidate_cache()
        except ABSENT:
            return set()
        names = (str(path)[len(self._root) :].lstrip("/") for path in found)
        return {name for name in names if part_of(name) not in parts}

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        self._ask(name, lambda address: self._fs._pipe_file(address, data), None)
