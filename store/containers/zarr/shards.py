"""Write Zarr arrays, each a zarr.json and one shard, and read the shards of a local folder.

A zarr.json is checked against FORMAT.md; chunk shapes and Blosc settings may have any value.

The writer produces the same bytes as zarr-python, in less time. The reader maps the file. It
supports the layouts that FORMAT.md allows, and decodes only the Blosc blocks with the requested
rows, straight into a caller's array. If `shard_layout` returns None, zarr-python reads the array.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc

from teachonce.store.containers.blosc import Bytes, Damage, decode
from teachonce.store.containers.interface import RowSlices
from teachonce.store.containers.memory_map import FileMap
from teachonce.store.format.layout import ArraySpec, dimension_names
from teachonce.support.arrays import Array

KEYS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding",
    "fill_value", "codecs", "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip
SHARDING = {"chunk_shape", "codecs", "index_codecs", "index_location"}
BLOSC = {"cname", "clevel", "shuffle", "typesize", "blocksize"}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
GROUP = {"attributes": {}, "zarr_format": 3, "node_type": "group"}


def group_json(attributes: dict[str, Any]) -> bytes:
    # All callers write this one form of JSON, so that equal stores have equal bytes, also in a
    # bucket and after a repair.
    return json.dumps(GROUP | {"attributes": attributes}, indent=1).encode()


def array_node(path: str, spec: ArraySpec, rows: int) -> dict[str, Any]:
    """Return the zarr.json of the array at `path`: one shard with chunks of `rows` rows."""
    # Zarr requires that a shard consists of whole chunks; FORMAT.md, that no dimension of it is 0.
    shard_rows = -(-max(1, spec.shape[0]) // rows) * rows
    row = [max(1, size) for size in spec.shape[1:]]
    packing = []
    if spec.packing is not None:
        settings = {"typesize": spec.dtype.itemsize, **spec.packing._asdict(), "blocksize": 0}
        packing = [{"name": "blosc", "configuration": settings}]
    sharding = {
        "chunk_shape": [rows, *row],
        # zarr-python leaves out the byte order of single bytes.
        "codecs": [LITTLE if spec.dtype.itemsize > 1 else {"name": "bytes"}, *packing, CRC],
        "index_codecs": [LITTLE, CRC],
        "index_location": "end",
    }
    # Keys have zarr-python's order and include its optional ones, so that the bytes are the same.
    return {
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows, *row]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": spec.dtype.type(0).item(),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "dimension_names": list(dimension_names(path, len(spec.shape))),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _name_and_configuration(extension: Any) -> tuple[Any, Any]:
    """Return name and configuration of a codec or chunk grid, which Zarr may write as its name
    alone."""
    if isinstance(extension, dict) and extension.keys() <= {"name", "configuration"}:
        return extension.get("name"), extension.get("configuration", {})
    return extension, {}


def _chain(codecs: Any) -> list[tuple[Any, Any]]:
    return [_name_and_configuration(codec) for codec in codecs] if isinstance(codecs, list) else []


def format_violation(node: dict[str, Any], path: str) -> str | None:
    """Describe what FORMAT.md forbids in the zarr.json of the array at `path`; None if it is
    valid."""
    rules = {
        "keys that are not of Zarr 3": node.keys() <= KEYS and node.get("node_type") == "array",
        "attributes": node.get("attributes", {}) == {},
        "storage transformers": node.get("storage_transformers", []) == [],
        "a fill value that is not 0": node.get("fill_value") == 0,
        "other dimension names": _names_agree(node, path),
        "more than one shard": _one_shard(node),
        "other chunk keys": _name_and_configuration(node.get("chunk_key_encoding"))
        in (("default", {"separator": "/"}), ("default", {})),
        "other codecs": _codecs_agree(node),
    }
    return next((rule for rule, holds in rules.items() if not holds), None)


def _names_agree(node: dict[str, Any], path: str) -> bool:
    shape, names = node.get("shape"), node.get("dimension_names")
    if names is None:  # older stores have no dimension names
        return True
    if not isinstance(shape, list) or not isinstance(names, list) or len(names) != len(shape):
        return False
    relative = re.sub(r"^parts/\d+/", "", path)
    return tuple(names) == dimension_names(relative, len(shape))


def _one_shard(node: dict[str, Any]) -> bool:
    grid, configuration = _name_and_configuration(node.get("chunk_grid"))
    try:
        pairs = zip(configuration["chunk_shape"], node["shape"], strict=True)
        return grid == "regular" and all(chunk >= max(1, size) for chunk, size in pairs)
    except (KeyError, TypeError, ValueError):
        return False


def _codecs_agree(node: dict[str, Any]) -> bool:
    match _chain(node.get("codecs")):
        case [("sharding_indexed", dict() as sharding)] if sharding.keys() <= SHARDING:
            pass
        case _:
            return False
    if _chain(sharding.get("index_codecs")) != _chain([LITTLE, CRC]):
        return False
    match _chain(sharding.get("codecs")):
        case [first, last]:
            pass
        case [first, ("blosc", dict() as settings), last] if settings.keys() <= BLOSC:
            pass
        case _:
            return False
    small = node.get("data_type") in ("bool", "int8", "uint8")
    plain = [first] == _chain([LITTLE]) or (small and first == ("bytes", {}))
    return plain and [last] == _chain([CRC])


CRC_BYTES = 4
ENTRY_BYTES = 16
DTYPES = {
    name: np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                 "float16", "float32", "float64")
}  # fmt: skip


@dataclass(frozen=True)
class ShardLayout:
    """Describes an array that is one shard, cut into chunks of whole rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    chunks: int
    compressed: bool

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape[1:])

    @property
    def chunk_bytes(self) -> int:
        """Return the decoded size of a chunk. The last chunk counts as full."""
        return self.rows * self.row_bytes


def shard_layout(node: dict[str, Any]) -> ShardLayout | None:
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
        # Values are views of the stored bytes, which are little-endian.
        sys.byteorder != "little"
        or dtype is None
        or index != LITTLE
        or (plain != LITTLE and dtype.itemsize > 1)
        or packed not in ([], ["blosc"])
        or node.get("storage_transformers")
        or not shape[1:] == row == shard_row
        # isinstance would accept JSON `true`, because a bool is an int.
        or any(type(size) is not int or size < 0 for size in shape)
        or not (0 < rows <= shard_rows and shape[0] <= shard_rows and shard_rows % rows == 0)
    ):
        return None
    return ShardLayout(tuple(shape), dtype, rows, shard_rows // rows, bool(packed))


def write_shard(path: Path, spec: ArraySpec, rows: int, values: Array, threads: Executor) -> None:
    """Write an array as one shard with chunks of `rows` rows. The last chunk is padded with
    zeros."""
    values = np.ascontiguousarray(values, spec.dtype.newbyteorder("<"))

    def stored(first: int) -> bytes:
        chunk = values[first : first + rows]
        if missing := rows - len(chunk):
            chunk = np.concatenate([chunk, np.zeros((missing, *chunk.shape[1:]), chunk.dtype)])
        if spec.packing is None:
            payload = chunk.tobytes()
        else:
            name, level, shuffle = spec.packing
            payload = blosc.compress(chunk, name.encode(), level, getattr(blosc, shuffle.upper()))
        return payload + _checksum(payload)

    index, offset = list[tuple[int, int]](), 0
    # Not in the main thread: there Blosc uses threads of its own, which write blocks in any order.
    with path.open("wb") as file:
        for chunk in threads.map(stored, range(0, len(values), rows)):
            index.append((offset, file.write(chunk)))
            offset += len(chunk)
        footer = np.array(index, "<u8").tobytes()
        file.write(footer + _checksum(footer))


def _checksum(data: bytes | Bytes) -> bytes:
    crc: int = google_crc32c.value(data)
    return crc.to_bytes(CRC_BYTES, "little")


def _checked(data: Bytes, subject: str) -> Bytes:
    """Compare the CRC-32C at the end of `data`; return the bytes before it. Raises Damage."""
    payload, stored = data[:-CRC_BYTES], data[-CRC_BYTES:].tobytes()
    if len(data) < CRC_BYTES or _checksum(payload) != stored:
        raise Damage(f"{subject} does not match its checksum")
    return payload


def index_bytes(layout: ShardLayout) -> int:
    """Return the size in bytes of the index at the end of a shard."""
    return layout.chunks * ENTRY_BYTES + CRC_BYTES


def read_index(data: Bytes, end: int) -> list[list[int]]:
    """Read the start and size of each chunk of a shard from its index, which starts at `end`. Both
    are 0 for a chunk that is missing or lies elsewhere. Raises Damage."""
    index = _checked(data, "the index").view("<u8").reshape(-1, 2)
    begin, size = index[:, 0], index[:, 1]
    # The first two comparisons exclude sums that overflow uint64. Zarr marks a missing chunk by
    # 2**64 - 1 twice, which is outside, too.
    inside = (begin <= end) & (size <= end) & (begin + size <= end)
    places: list[list[int]] = np.where(inside[:, None], index, 0).tolist()
    return places


class Shard:
    """Reads the chunks of a shard. `places` holds the start and size of each, as `read_index`
    returns them."""

    def __init__(self, layout: ShardLayout, places: list[list[int]]) -> None:
        self._layout, self.places = layout, places

    def prefetch(self, chunk: int) -> None:
        """Announce that a chunk will be read soon."""
        raise NotImplementedError

    def stored(self, chunk: int) -> tuple[Bytes, set[int]]:
        """Return the stored bytes of a chunk, and the set of chunks whose checksum was compared, to
        which `read_into` adds. Raises Damage."""
        raise NotImplementedError

    def read_into(self, chunk: int, low: int, high: int, out: Bytes) -> None:
        """Decode bytes low..high of a chunk into `out`; its checksum is compared when it is first
        read. Raises Damage."""
        subject, layout = f"chunk {chunk}", self._layout
        if not self.places[chunk][1]:
            raise Damage(f"{subject} is missing or lies outside the file")
        data, sound = self.stored(chunk)
        payload = data[:-CRC_BYTES] if chunk in sound else _checked(data, subject)
        size = layout.chunk_bytes
        if layout.compressed:
            decode(payload, subject, size, low, high, out)
        elif len(payload) != size:
            raise Damage(f"{subject} has {len(payload)} bytes, expected {size}")
        else:
            out[:] = payload[low:high]
        sound.add(chunk)


class MappedShard(Shard):
    """Reads a shard file through a memory map. Raises Damage, OSError."""

    def __init__(self, path: str, layout: ShardLayout) -> None:
        self._map = FileMap(path)
        self._data = self._map.data
        end = len(self._data) - index_bytes(layout)
        if end < 0:
            raise Damage(f"the file has {len(self._data)} bytes, too few for its index")
        super().__init__(layout, read_index(self._data[end:], end))
        self._sound: set[int] = set()

    def prefetch(self, chunk: int) -> None:
        """Ask the disk to read a chunk ahead, unless it was read before."""
        if chunk not in self._sound:
            self._map.prefetch(*self.places[chunk])

    def stored(self, chunk: int) -> tuple[Bytes, set[int]]:
        begin, size = self.places[chunk]
        return self._data[begin : begin + size], self._sound


class ShardSlices(RowSlices):
    """Reads slices of rows of an array that is one shard; `opened` returns the shard."""

    def __init__(self, layout: ShardLayout, where: str, opened: Callable[[], Shard]) -> None:
        super().__init__(layout.shape, layout.dtype, layout.rows, where)
        self.layout, self._shard = layout, opened

    def decode(self, begin: int, end: int, out: Array) -> None:
        rows, row = self.layout.rows, self.layout.row_bytes
        # `target` is a view, not a copy, because `read_into` has checked that `out` is contiguous.
        target, shard = out.reshape(-1).view(np.uint8), self._shard()
        for chunk in range(begin // rows, -(-end // rows)):
            first, last = max(begin, chunk * rows), min(end, (chunk + 1) * rows)
            offset, size = (first - begin) * row, (last - first) * row
            low = (first - chunk * rows) * row
            shard.read_into(chunk, low, low + size, target[offset : offset + size])

    def prefetch(self, begin: int, end: int) -> None:
        rows = self.layout.rows
        with suppress(Damage, OSError):  # reading reports what is wrong
            shard = self._shard()
            for chunk in range(begin // rows, -(-end // rows)):
                shard.prefetch(chunk)
