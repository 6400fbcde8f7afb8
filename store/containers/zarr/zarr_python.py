"""Read with zarr-python the Zarr arrays whose layout our own reader does not support."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.abc.codec import Codec
from zarr.codecs import BloscCodec, ShardingCodec
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore, MemoryStore, StorePath

from teachonce.store.containers.blosc import decoded_size
from teachonce.store.containers.network import with_refetches
from teachonce.store.containers.remote_ranges import ByteRange, RemoteRanges
from teachonce.store.containers.untrusted import MAX_CHUNK
from teachonce.store.errors import VERIFY, StoreError
from teachonce.support.arrays import Array

CODECS = ("blosc", "bytes", "crc32c", "sharding_indexed")


def _check_codecs(node: dict[str, Any], where: str) -> None:
    """Raise StoreError if the zarr.json of an array names a codec that FORMAT.md does not allow.
    Such a codec might decode a few bytes to more than the memory holds."""
    todo = [node.get("codecs")]
    while todo:
        listed = todo.pop()
        for codec in listed if isinstance(listed, list) else ():
            name = codec.get("name") if isinstance(codec, dict) else codec
            if name not in CODECS:
                raise StoreError(
                    f"{where}: codec {str(name)[:40]!r} is not allowed in a store (only"
                    f" {', '.join(CODECS)}); the store is damaged"
                )
            inner = codec.get("configuration") if isinstance(codec, dict) else None
            if isinstance(inner, dict):
                todo += [inner.get("codecs"), inner.get("index_codecs")]


class _BoundedBlosc(BloscCodec):
    """Decodes a Blosc frame only if the frame declares the size of its chunk."""

    # Releases of zarr-python differ in which of these two methods they call.
    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        _check_declared_size(chunk_bytes, chunk_spec)
        return await super()._decode_single(chunk_bytes, chunk_spec)

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        _check_declared_size(chunk_bytes, chunk_spec)
        return super()._decode_sync(chunk_bytes, chunk_spec)


def _check_declared_size(chunk_bytes: Any, chunk_spec: Any) -> None:
    size = prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
    # numcodecs allocates as many bytes as the frame declares.
    if (declared := decoded_size(chunk_bytes.as_numpy_array())) != size:
        raise ValueError(f"a chunk decodes to {declared} bytes, expected {size}")


def _bounded(codec: Codec) -> Codec:
    if isinstance(codec, BloscCodec):
        return _BoundedBlosc.from_dict(codec.to_dict())
    if isinstance(codec, ShardingCodec):
        return dataclasses.replace(codec, codecs=tuple(map(_bounded, codec.codecs)))
    return codec


def open_slices(path: str, name: str, node: dict[str, Any], where: str) -> ZarrSlices:
    """Open an array by its zarr.json, `node`. Raises StoreError.

    For a store behind a URL, call `ZarrSlices.read_from` before reading.
    """
    _check_codecs(node, where)
    fetched: dict[str, Buffer] = {}
    # For a URL, zarr-python reads from memory. So our own client bounds and retries the requests,
    # and a missing shard is an error instead of zeros.
    store = MemoryStore(fetched) if "://" in path else LocalStore(path, read_only=True)
    try:
        array: zarr.Array[Any] = zarr.Array.from_dict(StorePath(store, name), node)
        metadata: Any = array.metadata
        bounded = dataclasses.replace(metadata, codecs=tuple(map(_bounded, metadata.codecs)))
        return ZarrSlices(zarr.Array(zarr.AsyncArray(bounded, array.store_path)), where, fetched)
    except Exception as error:  # zarr raises many kinds for damaged metadata
        raise StoreError(f"{where} cannot be opened ({error}); the store is damaged") from error


class ZarrSlices:
    """Reads slices of rows of a Zarr array by zarr-python. For a remote store, the shard is fetched
    into memory first."""

    def __init__(self, array: zarr.Array[Any], where: str, fetched: dict[str, Buffer]) -> None:
        self._array, self._where, self._fetched = array, where, fetched
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self.chunk_rows: int = array.chunks[0]
        self.chunk_bytes = prod(array.chunks) * self.dtype.itemsize
        self._fetch: Callable[[], None] | None = None

    def read_from(self, ranges: RemoteRanges, shard: str, size: int) -> None:
        """Fetch the shard, which has `size` bytes. If it cannot be decoded, later reads fetch it
        again: a network can flip a bit.

        Raises FileNotFoundError, and StoreError if the shard is too large.
        """
        if size > MAX_CHUNK:
            raise StoreError(f"{self._where}: {shard} is larger than {MAX_CHUNK:,} bytes")

        def fetch() -> None:
            # Otherwise the damaged bytes would come from the cache again.
            ranges.forget(shard)
            data = ranges.get(ByteRange(shard, 0, size)).data
            self._fetched[shard] = cpu.Buffer.from_array_like(data)

        fetch()
        self._fetch = fetch

    def read(self, begin: int, end: int) -> Array:
        if begin >= end:
            return np.empty((0, *self.shape[1:]), self.dtype)
        return with_refetches(self._fetch is not None, lambda: self._read(begin, end))

    def _read(self, begin: int, end: int) -> Array:
        try:
            return np.asarray(self._array[begin:end])
        except Exception as error:  # codecs raise whatever their library raises
            if self._fetch is not None:
                self._fetch()
            raise StoreError(
                f"{self._where}: rows {begin}..{end} cannot be decoded ({error}); {VERIFY}"
            ) from error

    def read_into(self, begin: int, end: int, out: Array) -> None:
        out[...] = self.read(begin, end)

    def prefetch(self, begin: int, end: int) -> None:
        """Do nothing: zarr-python reads an array only when its rows are requested."""
