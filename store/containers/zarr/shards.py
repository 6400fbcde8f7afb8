"""Read Zarr shards of a local folder, decoded from a map of the file straight into a caller's
array.

Reads what FORMAT.md lets a writer write, and decodes only the Blosc blocks that hold the wanted
rows. Where `layout_of` gives None, zarr-python reads.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from teachonce.store.containers.blosc import Bytes, Damage, decode
from teachonce.store.containers.memory_map import FileMap
from teachonce.store.errors import VERIFY, StoreError
from teachonce.support.arrays import Array

OPEN_MAPS = 512
CRC_BYTES = 4
ENTRY_BYTES = 16
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                 "float16", "float32", "float64")
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """An array that is one shard, cut into chunks of whole rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    chunks: int
    compressed: bool

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape[1:])


def layout_of(node: dict[str, Any]) -> Layout | None:
    """Read the layout of an array from its zarr.json; None if this module cannot read such an
    array."""
    match node:
        case {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [int(), *_] as shape,
            "data_type": str(kind),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [int(shard_rows), *shard_row]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [int(rows), *row],
                        "codecs": [{"name": "bytes"} as plain, *packing, {"name": "crc32c"}],
                        "index_codecs": [{"name": "bytes"} as index, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
        }:
            pass
        case _:
            return None
    dtype = DTYPES.get(kind)
    packed = [isinstance(codec, dict) and codec.get("name") for codec in packing]
    if (
        sys.byteorder != "little"
        or dtype is None
        or index != LITTLE
        or (plain != LITTLE and dtype.itemsize > 1)
        or packed not in ([], ["blosc"])
        or node.get("storage_transformers")
        or not shape[1:] == row == shard_row
        or any(type(size) is not int or size < 0 for size in shape)
        or not (0 < rows <= shard_rows and shape[0] <= shard_rows and shard_rows % rows == 0)
    ):
        return None
    return Layout(tuple(shape), dtype, rows, shard_rows // rows, bool(packed))


def _checked(data: Bytes, what: str) -> Bytes:
    """Compare the CRC-32C at the end; returns the bytes before it. Raises Damage."""
    payload, stored = data[:-CRC_BYTES], data[-CRC_BYTES:].tobytes()
    if len(data) < CRC_BYTES or google_crc32c.value(payload) != int.from_bytes(stored, "little"):
        raise Damage(f"{what} does not match its checksum")
    return payload


def index_bytes(layout: Layout) -> int:
    """The bytes of the index at the end of a shard."""
    return layout.chunks * ENTRY_BYTES + CRC_BYTES


def read_index(data: Bytes, layout: Layout, end: int) -> list[list[int]]:
    """Begin and size of each chunk of a shard, from its index, which begins at `end`; zeros for a
    chunk that is missing or lies elsewhere. Raises Damage."""
    index = _checked(data, "the index").view("<u8").reshape(-1, 2)
    begin, size = index[:, 0], index[:, 1]
    inside = (begin <= end) & (size <= end) & (begin + size <= end)
    places: list[list[int]] = np.where(inside[:, None], index, 0).tolist()
    return places


def decode_rows(
    data: Bytes, chunk: int, layout: Layout, low: int, high: int, out: Bytes, sound: bool = False
) -> None:
    """Decode bytes low..high of a chunk into `out`; its checksum is compared unless it is known to
    be sound. Raises Damage."""
    what, size = f"chunk {chunk}", layout.rows * layout.row_bytes
    payload = data[:-CRC_BYTES] if sound else _checked(data, what)
    if layout.compressed:
        decode(payload, what, size, low, high, out)
    elif len(payload) != size:
        raise Damage(f"{what} has {len(payload)} bytes, expected {size}")
    else:
        out[:] = payload[low:high]


def check_fits(layout: Layout, where: str, begin: int, end: int, out: Array) -> None:
    """Raise ValueError unless rows begin..end are rows of the array that fit into `out`."""
    if (
        not 0 <= begin < end <= layout.shape[0]
        or (out.shape, out.dtype) != ((end - begin, *layout.shape[1:]), layout.dtype)
        or not out.flags.c_contiguous
    ):
        raise ValueError(f"{where}: rows {begin}..{end} do not fit into {out.shape}")


def row_pieces(layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """For each chunk of rows begin..end its number, the bytes low..high of it that they are, and
    the place of these among the bytes of the rows."""
    rows, row = layout.rows, layout.row_bytes
    for chunk in range(begin // rows, -(-end // rows)):
        first, last = max(begin, chunk * rows), min(end, (chunk + 1) * rows)
        low, high = (first - chunk * rows) * row, (last - chunk * rows) * row
        yield chunk, low, high, (first - begin) * row


class Shard:
    """A mapped shard file and the places of its chunks. Raises Damage, OSError."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._layout = layout
        self._map = FileMap(path)
        self._data = self._map.data
        end = len(self._data) - index_bytes(layout)
        if end < 0:
            raise Damage(f"the file has {len(self._data)} bytes, too few for its index")
        self._places = read_index(self._data[end:], layout, end)
        self._sound: set[int] = set()

    def prefetch(self, chunk: int) -> None:
        """Let the disk begin to read a chunk, unless it was read before."""
        if chunk not in self._sound:
            self._map.prefetch(*self._places[chunk])

    def read_into(self, chunk: int, low: int, high: int, out: Bytes) -> None:
        """Decode bytes low..high of a chunk into `out`. Raises Damage."""
        begin, size = self._places[chunk]
        if not size:
            raise Damage(f"chunk {chunk} is missing or lies outside the file")
        data, sound = self._data[begin : begin + size], chunk in self._sound
        decode_rows(data, chunk, self._layout, low, high, out, sound)
        self._sound.add(chunk)


class ShardMaps:
    """The maps that were used last; a store of thousands of parts must not map all of them."""

    def __init__(self, limit: int = OPEN_MAPS) -> None:
        self._limit = limit
        self._held: OrderedDict[Path, Shard] = OrderedDict()

    def get(self, path: Path, layout: Layout) -> Shard:
        """The map of a file. Raises Damage, OSError."""
        # No lock, which a fork could inherit: two threads may map one file twice, no more.
        shard = self._held.pop(path, None) or Shard(path, layout)
        self._held[path] = shard
        while len(self._held) > self._limit:
            self._held.popitem(last=False)
        return shard

    def clear(self) -> None:
        """Let go of all maps; a map in use ends with its reader."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


class ShardSlices:
    """Slices of rows of an array that is one shard."""

    waits = False

    def __init__(self, maps: ShardMaps, path: Path, layout: Layout, where: str) -> None:
        self._maps, self._path, self._layout, self._where = maps, path, layout, where
        self.shape, self.dtype = layout.shape, layout.dtype

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        out = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.read_into(begin, end, out)
        return out

    def read_into(self, begin: int, end: int, out: Array) -> None:
        if begin >= end:
            return
        check_fits(self._layout, self._where, begin, end, out)
        target = out.reshape(-1).view(np.uint8)
        try:
            shard = self._maps.get(self._path, self._layout)
            for chunk, low, high, place in row_pieces(self._layout, begin, end):
                shard.read_into(chunk, low, high, target[place : place + high - low])
        except (Damage, OSError) as error:
            raise StoreError(
                f"{self._where}: rows {begin}..{end} cannot be decoded ({error}); {VERIFY}"
            ) from error

    def prefetch(self, begin: int, end: int) -> None:
        rows = self._layout.rows
        with suppress(Damage, OSError):  # reading says what is wrong
            shard = self._maps.get(self._path, self._layout)
            for chunk in range(begin // rows, -(-end // rows)):
                shard.prefetch(chunk)
