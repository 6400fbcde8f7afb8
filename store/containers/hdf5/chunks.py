"""Read HDF5 datasets: find their chunks and decode rows from a map of the file, in any thread."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numcodecs import Fletcher32

from teachonce.store.containers.blosc import Bytes, Damage, decode
from teachonce.store.containers.hdf5.blocks import CHECKSUM, UNDEFINED, Blocks, FieldReader
from teachonce.store.containers.hdf5.indices import entry_bytes, fixed_array, old_index
from teachonce.store.containers.hdf5.objects import (
    EXTERNAL,
    FILTERS,
    LAYOUT,
    SPACE,
    TYPE,
    Object,
    dataspace,
    type_of,
)
from teachonce.store.containers.interface import RowSlices
from teachonce.store.containers.untrusted import check_size
from teachonce.support.arrays import Array

BLOSC, FLETCHER = 32001, 3
ALLOWED = ((), (FLETCHER,), (BLOSC,), (BLOSC, FLETCHER))
COMPACT, CONTIGUOUS, CHUNKED = 0, 1, 2
SINGLE, IMPLICIT, FIXED = 1, 2, 3  # kinds of chunk index
WHOLE_SINGLE = 2  # flag of a layout: its single chunk is filtered


@dataclass(frozen=True)
class Dataset:
    """Describes an array and its chunks, which are in the row-major order of the chunk grid.

    places: uint64 [n, 3], for each chunk its address (may be UNDEFINED), number of stored bytes,
    and mask of skipped filters. inline: the values, if they are in the header of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    filters: tuple[int, ...]
    places: Array
    chunked: bool
    inline: bytes | None = None

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk, strict=True))

    @property
    def stored(self) -> int:
        """Return the number of stored bytes of all chunks."""
        return int(self.places[:, 1].sum())

    def decode(self, skipped: int, stored: Bytes, low: int, high: int, out: Bytes) -> None:
        """Decode bytes low..high of a chunk. Raises Damage.

        Bit i of `skipped` is set if filter i was not applied to this chunk.
        """
        # HDF5 stores a chunk without Blosc if Blosc does not shrink it.
        applied = [name for index, name in enumerate(self.filters) if not skipped >> index & 1]
        if FLETCHER in applied:
            stored = stored[:-CHECKSUM]
        if BLOSC in applied:
            decode(stored, "the chunk", self.chunk_bytes, low, high, out)
        elif len(stored) == self.chunk_bytes:
            out[:] = stored[low:high]
        else:
            raise Damage(f"the chunk has {len(stored)} bytes, expected {self.chunk_bytes}")

    def check_sum(self, skipped: int, stored: Bytes) -> None:
        """Compare the Fletcher-32 checksum at the end of a chunk, if it has one. Raises Damage."""
        for index, name in enumerate(self.filters):
            if name == FLETCHER and not skipped >> index & 1:
                try:
                    Fletcher32().decode(stored)
                except (RuntimeError, IndexError) as error:  # a wrong sum; too few bytes
                    raise Damage("the chunk does not match its checksum") from error


def read_dataset(blocks: Blocks, thing: Object, where: str, is_json: bool) -> Dataset:
    """Read how an array is stored, without its values. Raises Damage; StoreError, which names
    `where`, if the array declares an impossible size. If `is_json`, the limit for JSON text
    applies."""
    if EXTERNAL in thing.messages:
        raise Damage("its values are in another file, which is not followed")
    dtype = type_of(thing.one(TYPE, "the type of the array"))
    shape = dataspace(thing.one(SPACE, "the shape of the array"))
    if dtype.kind == "S" or not shape:
        raise Damage("it is a string or a scalar")
    filters = _filters(thing)
    layout = _Layout(blocks, thing.one(LAYOUT, "the layout of the array"), shape, dtype, filters)
    dataset = layout.dataset()
    size = prod(shape) * dtype.itemsize
    chunk = dataset.chunk_bytes if dataset.chunked and size else 0
    check_size(where, size, chunk, dataset.stored, is_json)
    _check_no_overlap(dataset.places)
    return dataset


def _filters(thing: Object) -> tuple[int, ...]:
    """Return the numbers of the filters, in the order of encoding."""
    if FILTERS not in thing.messages:
        return ()
    fields = thing.one(FILTERS, "the list of filters")
    version, numbers = fields.expect("its version", 1, 1, 2), []
    count = fields.number(1)
    fields.take(6 if version == 1 else 0)
    for _ in range(count):
        numbers.append(fields.number(2))
        # In version 2, filters below 256, which are HDF5's own, have no name.
        name = fields.number(2) if version == 1 or numbers[-1] >= 256 else 0
        fields.number(2)
        settings = fields.number(2)
        # Version 1 pads an odd number of settings by one more.
        fields.take(name + 4 * (settings + (settings & 1 if version == 1 else 0)))
    if foreign := set(numbers) - {BLOSC, FLETCHER}:
        raise Damage(
            f"HDF5 filter {min(foreign)} is not allowed in a store (only {BLOSC}, Blosc, and"
            " Fletcher-32)"
        )
    if tuple(numbers) not in ALLOWED:
        raise Damage("its filters are not Blosc, then Fletcher-32")
    return tuple(numbers)


def _check_no_overlap(places: Array) -> None:
    """Raise Damage if chunks share bytes."""
    # Otherwise a small file could declare any number of chunks.
    stored = places[places[:, 0] != UNDEFINED]
    stored = stored[np.argsort(stored[:, 0])]
    # The sums cannot overflow: `_check_inside` has compared all places with the file's size.
    if (stored[:-1, 0] + stored[:-1, 1] > stored[1:, 0]).any():
        raise Damage("its chunks overlap")


@dataclass
class _Layout:
    """Reads the layout message of an array."""

    blocks: Blocks
    fields: FieldReader
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    filters: tuple[int, ...]

    def dataset(self) -> Dataset:
        fields, version = self.fields, self.fields.expect("its version", 1, 3, 4, 5)
        kind = fields.expect("its kind (virtual datasets are not followed)", 1, 0, 1, 2)
        if kind == CHUNKED:
            return self._chunked(version)
        inline = fields.take(fields.number(2)) if kind == COMPACT else None
        address = fields.address() if inline is None else 0
        size = fields.number(8) if inline is None else len(inline)
        expected = prod(self.shape) * self.dtype.itemsize
        if size != expected or self.filters:
            raise Damage(f"it has {size:,} bytes, expected {expected:,}")
        places = np.array([[address, size, 0]] if size else np.empty((0, 3)), np.uint64)
        self._check_inside(places if inline is None else places[:0])
        chunk = tuple(max(1, size) for size in self.shape)
        return Dataset(self.shape, self.dtype, chunk, (), places, False, inline)

    def _chunked(self, version: int) -> Dataset:
        fields = self.fields
        flags = fields.number(1) if version > 3 else 0
        rank = fields.number(1)
        tree = fields.address() if version == 3 else UNDEFINED
        width = fields.number(1) if version > 3 else 4
        chunk = [fields.number(width) for _ in range(rank)]
        if flags & ~WHOLE_SINGLE:
            raise Damage("its edge chunks are stored without the filters of the others")
        sizes = zip(chunk, (*self.shape, self.dtype.itemsize), strict=False)
        if rank != len(self.shape) + 1 or any(not 0 < part <= length for part, length in sizes):
            raise Damage(f"chunks of shape {chunk[:-1]} do not fit shape {list(self.shape)}")
        # HDF5 stores the size of an element as one more dimension of the chunk.
        if chunk.pop() != self.dtype.itemsize:
            raise Damage("its chunks are of another type")
        size = prod(chunk) * self.dtype.itemsize
        grid = [-(-length // part) for length, part in zip(self.shape, chunk, strict=True)]
        if version == 3:
            places = old_index(self.blocks, tree, chunk, grid)
        else:
            kind = fields.expect("the kind of its index", 1, SINGLE, IMPLICIT, FIXED)
            wide = version == 5  # then the size of a chunk is stored in 8 bytes
            places = self._places(kind, bool(flags & WHOLE_SINGLE), size, prod(grid), wide)
        self._check_inside(places)
        return Dataset(self.shape, self.dtype, tuple(chunk), self.filters, places, True)

    def _places(self, kind: int, filtered: bool, size: int, count: int, wide: bool) -> Array:
        fields = self.fields
        if kind == SINGLE:
            stored, skipped = (fields.number(8), fields.number(4)) if filtered else (size, 0)
            if count > 1 or filtered != bool(self.filters):
                raise Damage("it has more than a single chunk")
            return np.array([fields.address(), stored, skipped] * count, np.uint64).reshape(-1, 3)
        bits = fields.number(1) if kind == FIXED else 0
        address = fields.address()
        if address == UNDEFINED or not count:
            return np.empty((0, 3), np.uint64)
        if kind == FIXED:
            entry = 8 + (entry_bytes(size, wide) if self.filters else 0)
            return fixed_array(self.blocks, address, bits, count, size, entry)
        # Chunks without an index have the same size, which a filter would change. Their number is
        # compared with the file before memory is allocated for them.
        if self.filters or count * size > len(self.blocks.map.data):
            raise Damage("chunks without an index do not fit into the file, or have a filter")
        places = np.zeros((count, 3), np.uint64)
        places[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(size)
        places[:, 1] = size
        return places

    def _check_inside(self, places: Array) -> None:
        """Set the size of missing chunks to 0. Raise Damage if a chunk is outside the file."""
        end = np.uint64(len(self.blocks.map.data))
        stored = places[:, 0] != UNDEFINED
        places[~stored, 1] = 0
        begin, size = places[stored, 0], places[stored, 1]
        # Address and size are also compared one by one, because their sum may overflow uint64.
        if ((begin > end) | (size > end) | (begin + size > end)).any():
            raise Damage("a chunk lies outside the file")


class Hdf5Slices(RowSlices):
    def __init__(self, blocks: Blocks, dataset: Dataset, where: str) -> None:
        super().__init__(dataset.shape, dataset.dtype, dataset.chunk[0], where)
        self._blocks, self.dataset = blocks, dataset
        self._sound: set[int] = set()  # chunks whose checksum was compared
        self._prefetched: set[int] = set()  # rows of chunks

    def decode(self, begin: int, end: int, out: Array) -> None:
        rows = self.dataset.chunk[0]
        for number in range(begin // rows, -(-end // rows)):
            low, high = max(begin, number * rows), min(end, (number + 1) * rows)
            self._read(number, low - number * rows, out[low - begin : high - begin])

    def _read(self, number: int, low: int, out: Array) -> None:
        """Fill `out` with array rows from row `number` of the chunk grid, starting at row `low` of
        these chunks."""
        dataset = self.dataset
        row = prod(dataset.chunk[1:]) * dataset.dtype.itemsize
        columns = dataset.grid[1:]
        edges = low * row, (low + len(out)) * row
        for index, corner in enumerate(np.ndindex(*columns), number * prod(columns)):
            skipped, stored = self._stored(index)
            if dataset.chunk[1:] == self.shape[1:] and out.flags.c_contiguous:
                dataset.decode(skipped, stored, *edges, out.reshape(-1).view(np.uint8))
                continue
            box = np.empty((len(out), *dataset.chunk[1:]), self.dtype)
            dataset.decode(skipped, stored, *edges, box.reshape(-1).view(np.uint8))
            sizes = zip(corner, dataset.chunk[1:], strict=True)
            part = out[(slice(None), *(slice(at * n, at * n + n) for at, n in sizes))]
            part[...] = box[tuple(map(slice, part.shape))]

    def _stored(self, index: int) -> tuple[int, Bytes]:
        """Return the filters that were skipped for a chunk, and its bytes; compare its checksum at
        its first use."""
        if self.dataset.inline is not None:
            return 0, np.frombuffer(self.dataset.inline, np.uint8)
        places = self.dataset.places
        address, size, skipped = places[index].tolist() if index < len(places) else (UNDEFINED,) * 3
        if address == UNDEFINED:
            raise Damage(f"chunk {index} is missing")
        stored = self._blocks.raw(address, size, f"chunk {index}")
        if index not in self._sound:
            self.dataset.check_sum(skipped, stored)
            self._sound.add(index)
        return skipped, stored

    def prefetch(self, begin: int, end: int) -> None:
        """Ask the disk to read ahead the chunks of rows begin..end."""
        # One range suffices: a dataset is written at once, so its chunks are contiguous.
        rows, columns = self.dataset.chunk[0], prod(self.dataset.grid[1:])
        first, last = begin // rows, -(-end // rows)
        if self._prefetched.issuperset(range(first, last)):
            return
        self._prefetched.update(range(first, last))
        places = self.dataset.places[first * columns : last * columns]
        places = places[places[:, 0] != UNDEFINED]
        if len(places):
            low, high = int(places[:, 0].min()), int((places[:, 0] + places[:, 1]).max())
            self._blocks.map.prefetch(low, high - low)
