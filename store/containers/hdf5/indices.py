"""Read the chunk index of an HDF5 dataset: address, size and filters of each chunk."""

from __future__ import annotations

from math import prod

import numpy as np

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5.blocks import CHECKSUM, UNDEFINED, Blocks, FieldReader
from teachonce.support.arrays import Array

MAX_DEPTH = 16  # FORMAT.md, section 3
SKIPPED = 4  # bytes of the mask of skipped filters
WHAT = "the index of chunks"


def entry_bytes(size: int, wide: bool) -> int:
    """Return the number of bytes that an index entry uses for a chunk's stored size and its mask of
    skipped filters.

    size: decoded bytes of a chunk. wide: sizes take 8 bytes (layout version 5).
    """
    # HDF5 uses one byte more than `size` needs, because a filter may enlarge the chunk.
    return SKIPPED + (8 if wide else min(8, 1 + (size.bit_length() + 7) // 8))


def fixed_array(
    blocks: Blocks, address: int, bits: int, count: int, size: int, entry: int
) -> Array:
    """Read a fixed array, HDF5's index of the chunks of an array that cannot grow.

    Returns uint64 [count, 3]; see `Dataset.places`. count: number of chunks. size: stored bytes of
    a chunk that no filter changes. bits: a page has 2^bits entries. entry: bytes of an entry; an
    entry of more than 8 bytes also has the stored size and the skipped filters of its chunk.
    """
    filtered = entry > 8
    kinds = [("address", 8), ("size", entry - 8 - SKIPPED), ("skipped", SKIPPED)]
    row = np.dtype([(name, np.uint8, (n,)) for name, n in kinds[: 3 if filtered else 1]])
    fields = blocks.block(address, 28, b"FAHD", WHAT)
    fields.expect("its version", 1, 0)
    fields.expect("its kind", 1, int(filtered))
    fields.expect("the size of an entry", 1, row.itemsize)
    fields.expect("the bits of a page", 1, bits)
    fields.expect("the number of chunks", 8, count)
    data = _entries(blocks, fields.address(), address, 1 << bits, count, row.itemsize, filtered)
    rows = np.frombuffer(data, row)
    places = np.zeros((count, 3), np.uint64)
    places[:, 0], places[:, 1] = _numbers(rows["address"]), size
    if filtered:
        places[:, 1], places[:, 2] = _numbers(rows["size"]), _numbers(rows["skipped"])
    return places


def _entries(
    blocks: Blocks, address: int, header: int, page: int, count: int, row: int, filtered: bool
) -> bytes:
    """Return the entries of a fixed array, of `row` bytes each. If there are several pages of
    `page` entries, each page has a checksum. header: the address of the array's header, to
    compare."""
    fixed_bytes = 14
    pages = -(-count // page) if count > page else 0
    bitmap = -(-pages // 8)
    first = fixed_bytes + bitmap + (0 if pages else count * row) + CHECKSUM
    fields = blocks.block(address, first, b"FADB", WHAT)
    fields.expect("its version", 1, 0)
    fields.expect("its kind", 1, int(filtered))
    fields.expect("the address of its header", 8, header)
    if not pages:
        return fields.take(fields.left)
    used, entries = fields.take(bitmap), []
    for number in range(pages):
        length = min(page, count - number * page) * row
        start = address + first + number * (page * row + CHECKSUM)
        # In each byte of the bitmap, the highest bit is for the first page.
        if not used[number // 8] & 128 >> number % 8:
            raise Damage("some of its chunks are missing")
        # A page has a checksum and no signature.
        entries.append(blocks.block(start, length + CHECKSUM, b"", WHAT).take(length))
    return b"".join(entries)


def _numbers(fields: Array) -> Array:
    """Convert little-endian numbers uint8 [n, bytes] to uint64 [n]."""
    padded = np.zeros((len(fields), 8), np.uint8)
    padded[:, : fields.shape[1]] = fields
    return padded.view("<u8")[:, 0]


def old_index(blocks: Blocks, address: int, chunk: list[int], grid: list[int]) -> Array:
    """Read a B-tree of version 1: the index of an array that was written for HDF5 before 1.10.
    Returns uint64 [chunks, 3]; see `Dataset.places`. chunk: shape of a chunk. grid: numbers of
    chunks."""
    if address == UNDEFINED:
        return np.empty((0, 3), np.uint64)
    count, rank = prod(grid), len(grid)
    if count > len(blocks.map.data):  # each chunk has an entry in the file
        raise Damage("some of its chunks are missing")
    places = np.zeros((count, 3), np.uint64)
    places[:, 0] = UNDEFINED
    todo, visited = [(address, -1)], {address}
    while todo:
        node, level = todo.pop()
        # Trees of version 1 have no checksums, so their fields are compared with the array instead.
        head = FieldReader(blocks.read(node, 24, WHAT), WHAT)
        if head.take(4) != b"TREE":
            raise Damage(f"{WHAT} does not begin with TREE")
        head.expect("its type", 1, 1)
        height = head.expect("its level", 1, *([level] if level >= 0 else range(MAX_DEPTH)))
        entries, key = head.number(2), 8 + 8 * (rank + 1)
        fields = FieldReader(blocks.read(node + 24, entries * (key + 8) + key, WHAT), WHAT)
        for _ in range(entries):
            size, skipped = fields.number(4), fields.number(4)
            corner = [fields.number(8) for _ in range(rank + 1)][:rank]
            child = fields.address()
            if height and child not in visited:
                visited.add(child)
                todo.append((child, height - 1))
                continue
            at = [offset // part for offset, part in zip(corner, chunk, strict=True)]
            if height or any(number >= limit for number, limit in zip(at, grid, strict=True)):
                raise Damage(f"{WHAT} has a chunk outside the array, or a node twice")
            places[np.ravel_multi_index(at, grid)] = child, size, skipped
    return places
