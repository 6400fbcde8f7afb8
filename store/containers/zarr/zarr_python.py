"""Read Zarr arrays that our reader does not know by zarr-python."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import zarr
from zarr.abc.codec import Codec
from zarr.abc.store import Store
from zarr.codecs import BloscCodec, ShardingCodec
from zarr.storage import MemoryStore, StorePath

from teachonce.store.containers.blosc import decoded_size
from teachonce.store.containers.network import surely
from teachonce.store.errors import VERIFY, StoreError
from teachonce.support.arrays import Array

CODECS = ("blosc", "bytes", "crc32c", "sharding_indexed")


def check_codecs(node: dict[str, Any], where: str) -> None:
    """Raise StoreError if the zarr.json of an array names a codec that FORMAT.md does not allow: it
    might decode a few bytes to more than the memory holds."""
    todo = [node.get("codecs")]
    while todo:
        listed = todo.pop()
        for codec in listed if isinstance(listed, list) else ():
            name = codec.get("name") if isinstance(codec, dict) else codec
            if name not in CODECS:
                raise StoreError(
                    f"{where}: codec {str(name)[:40]!r} has no place in a store (only"
                    f" {', '.join(CODECS)}); the store is damaged"
                )
            inner = codec.get("configuration") if isinstance(codec, dict) else None
            if isinstance(inner, dict):
                todo += [inner.get("codecs"), inner.get("index_codecs")]


class _BoundedBlosc(BloscCodec):
    """Blosc that decodes a frame only if it declares the size of its chunk."""

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        size = prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        if (declared := decoded_size(chunk_bytes.as_numpy_array())) != size:
            raise ValueError(f"a chunk decodes to {declared} bytes, expected {size}")
        return await super()._decode_single(chunk_bytes, chunk_spec)


def _bounded(codec: Codec) -> Codec:
    if isinstance(codec, BloscCodec):
        return _BoundedBlosc.from_dict(codec.to_dict())
    if isinstance(codec, ShardingCodec):
        return dataclasses.replace(codec, codecs=tuple(map(_bounded, codec.codecs)))
    return codec


def _array(store: Store, name: str, node: dict[str, Any]) -> zarr.Array[Any]:
    return zarr.Array.from_dict(StorePath(store, name), node)


def chunk_rows(node: dict[str, Any]) -> int:
    """Rows of a chunk of an array, by its zarr.json. Raises the errors of zarr-python."""
    rows: int = _array(MemoryStore(), "", node).chunks[0]
    return rows


def open_slices(
    store: Store, name: str, node: dict[str, Any], where: str
) -> tuple[ZarrSlices, int]:
    """Open an array of a Zarr store by its zarr.json `node`; returns it and the bytes of a decoded
    chunk. Raises the errors of zarr-python."""
    array = _array(store, name, node)
    metadata: Any = array.metadata
    bounded = dataclasses.replace(metadata, codecs=tuple(map(_bounded, metadata.codecs)))
    slices = ZarrSlices(zarr.Array(zarr.AsyncArray(bounded, array.store_path)), where)
    return slices, prod(array.chunks) * slices.dtype.itemsize


class ZarrSlices:
    """Slices of rows of a Zarr array, read by zarr-python.

    `fetch`, of an array over a network, fetches its shard again into the memory that zarr-python
    reads: a network can flip a bit.
    """

    def __init__(self, array: zarr.Array[Any], where: str) -> None:
        self._array, self._where = array, where
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        self.fetch: Callable[[], None] | None = None

    def read(self, begin: int, end: int) -> Array:
        if begin >= end:
            return np.empty((0, *self.shape[1:]), self.dtype)
        return surely(self.fetch is not None, lambda: self._read(begin, end))

    def _read(self, begin: int, end: int) -> Array:
        try:
            return np.asarray(self._array[begin:end])
        except Exception as error:  # codecs raise whatever their library raises
            if self.fetch is not None:
                self.fetch()
            raise StoreError(
                f"{self._where}: rows {begin}..{end} cannot be decoded ({error}); {VERIFY}"
            ) from error

    def read_into(self, begin: int, end: int, out: Array) -> None:
        out[...] = self.read(begin, end)

    def prefetch(self, begin: int, end: int) -> None:
        """Do nothing: zarr-python reads when it is asked."""
