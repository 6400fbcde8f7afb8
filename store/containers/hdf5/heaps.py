"""Read fractal heaps and their B-trees of version 2: links of large groups, large attributes."""

from __future__ import annotations

from collections.abc import Iterator

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5.blocks import (
    CHECKSUM,
    UNDEFINED,
    Blocks,
    FieldReader,
    check_sum,
)

MAX_DEPTH = 16  # FORMAT.md, section 3
HUGE = 1  # the type of a B-tree of large objects
NODE = 6  # bytes of a node before its records
POWERS = {2**power for power in range(41)}


def _bytes_for(number: int) -> int:
    """Return the number of bytes in which HDF5 stores numbers up to this one."""
    return max(1, -(-number.bit_length() // 8))


class BTree:
    """Reads a B-tree of type `kind`: its header, and the sizes of its nodes. Raises Damage."""

    def __init__(self, blocks: Blocks, address: int, kind: int) -> None:
        fields = blocks.block(address, 38, b"BTHD", "a B-tree")
        fields.expect("its version", 1, 0)
        fields.expect("its type", 1, kind)
        self.kind, self._blocks = kind, blocks
        self._node, self._record = fields.number(4), fields.number(2)
        depth = fields.number(2)
        fields.number(2)  # percentages at which nodes are split and merged
        self._root, count, self._total = fields.address(), fields.number(2), fields.number(8)
        if depth > MAX_DEPTH or not 0 < self._record < self._node <= 2**24:
            raise Damage("a B-tree has impossible sizes")
        self._pointers: list[tuple[int, int]] = [(0, 0)]  # sizes of a child's two counts
        capacity = total = (self._node - NODE - CHECKSUM) // self._record
        count_bytes = _bytes_for(capacity)
        for level in range(depth):
            # A pointer to a leaf has no total, which would equal the number of records of the leaf.
            self._pointers.append((count_bytes, _bytes_for(total) if level else 0))
            pointer = 8 + sum(self._pointers[-1])
            capacity = (self._node - NODE - CHECKSUM - pointer) // (self._record + pointer)
            total = (capacity + 1) * total + capacity
        self._depth, self._count = depth, count

    def records(self) -> Iterator[FieldReader]:
        """Yield the records in order. Raises Damage if two pointers lead to one node."""
        if not self._total:
            return
        visited: set[int] = set()
        count = 0
        for record in self._under(self._root, self._count, self._depth, visited):
            yield FieldReader(record, "a record of a B-tree")
            count += 1
        if count != self._total:
            raise Damage(f"a B-tree has {count} records, expected {self._total}")

    def _under(self, address: int, count: int, depth: int, visited: set[int]) -> Iterator[bytes]:
        count_bytes, total_bytes = self._pointers[depth]
        children = count + 1 if depth else 0
        # The checksum follows the last record, and is not at the end of the node.
        used = NODE + count * self._record + children * (8 + count_bytes + total_bytes) + CHECKSUM
        if address in visited or used > self._node:
            raise Damage("a B-tree refers to a node twice, or has a node that is too large")
        visited.add(address)
        signature = b"BTIN" if depth else b"BTLF"
        fields = self._blocks.block(address, used, signature, "a node of a B-tree")
        fields.expect("its version", 1, 0)
        fields.expect("its type", 1, self.kind)
        records = [fields.take(self._record) for _ in range(count)]
        if not depth:
            yield from records
            return
        for index in range(children):
            child, child_count = fields.address(), fields.number(count_bytes)
            fields.number(total_bytes)
            yield from self._under(child, child_count, depth - 1, visited)
            yield from records[index : index + 1]


class Heap:
    """Reads a fractal heap without filters. Its methods raise Damage."""

    def __init__(self, blocks: Blocks, address: int) -> None:
        fields = blocks.block(address, 146, b"FRHP", "a heap")
        fields.expect("its version", 1, 0)
        self._blocks, self._address = blocks, address
        self._id_bytes = fields.number(2)
        fields.expect("the size of its filters", 2, 0)
        # Bit 1 of the flags means that direct blocks have checksums.
        self._checked = bool(fields.number(1) & 2)
        largest = fields.number(4)
        fields.number(8)
        self._huge_tree = fields.address()
        fields.take(10 * 8)  # statistics and free space
        self._width, self._start, self._direct = (fields.number(n) for n in (2, 8, 8))
        self._bits = fields.number(2)
        fields.number(2)
        self._root, self._rows = fields.address(), fields.number(2)
        sizes = self._width, self._start, self._direct
        # `_locate_block` computes with bit lengths, which is right for powers of two only.
        if not (POWERS.issuperset(sizes) and self._start <= self._direct and self._bits <= 64):
            raise Damage("a heap has impossible sizes")
        self._offset_bytes = -(-self._bits // 8)
        direct = -(-(self._direct.bit_length() - 1) // 8)
        self._length_bytes = min(direct, _bytes_for(largest))
        self._direct_rows = self._direct.bit_length() - self._start.bit_length() + 2
        self._cached: dict[int, bytes] = {}
        self._huge: dict[int, tuple[int, int]] | None = None

    def get(self, fields: FieldReader) -> bytes:
        """Return the object whose heap ID is next in a record."""
        heap_id = FieldReader(fields.take(self._id_bytes), "a heap ID")
        kind = heap_id.number(1)
        if kind == 0x10:
            return self._large(heap_id)
        # Tiny objects, inside their own ID of 7 or 8 bytes, are shorter than any link or attribute.
        if kind:
            raise Damage(f"a heap ID has type {kind:#x}, expected 0 or 0x10")
        offset, size = heap_id.number(self._offset_bytes), heap_id.number(self._length_bytes)
        address, length, base = self._locate_block(offset)
        if offset - base + size > length:
            raise Damage("an object of a heap is longer than its block")
        return self._block(address, length, base)[offset - base : offset - base + size]

    def _large(self, heap_id: FieldReader) -> bytes:
        # An ID with room for address and size holds them. A shorter one is the key of a B-tree.
        if self._id_bytes - 1 >= 16:
            return self._blocks.read(heap_id.address(), heap_id.number(8), "an object of a heap")
        if self._huge is None:
            tree = BTree(self._blocks, self._huge_tree, HUGE).records()
            listed = [(item.address(), item.number(8), item.number(8)) for item in tree]
            self._huge = {number: (address, size) for address, size, number in listed}
        number = heap_id.number(min(8, self._id_bytes - 1))
        if number not in self._huge:
            raise Damage("a large object of a heap is missing")
        return self._blocks.read(*self._huge[number], "an object of a heap")

    def _block(self, address: int, size: int, base: int) -> bytes:
        """Return a direct block; compare its checksum at its first use."""
        if address not in self._cached:
            data = self._blocks.read(address, size, "a block of a heap")
            self._check_head(FieldReader(data, "a block of a heap"), b"FHDB", base)
            if self._checked:
                start = 13 + self._offset_bytes
                # HDF5 computes the checksum while the field of the checksum holds zeros.
                zeroed = data[:start] + bytes(CHECKSUM) + data[start + CHECKSUM :]
                check_sum(zeroed, data[start : start + CHECKSUM], "a block of a heap")
            self._cached[address] = data
        return self._cached[address]

    def _check_head(self, fields: FieldReader, signature: bytes, base: int) -> None:
        if signature == b"FHDB" and fields.take(4) != signature:
            raise Damage("a block of a heap does not begin with FHDB")
        fields.expect("its version", 1, 0)
        fields.expect("the address of its heap", 8, self._address)
        fields.expect("its offset", self._offset_bytes, base)

    def _locate_block(self, offset: int) -> tuple[int, int, int]:
        """Return address, size and first offset of the direct block that contains the byte at
        `offset` of the heap."""
        if not self._rows:
            return self._root, self._start, 0
        address, rows, base, first = self._root, self._rows, 0, self._width * self._start
        while True:
            relative = offset - base
            row = (relative // first).bit_length()
            # Rows 0 and 1 have blocks of the starting size; each later row doubles the size.
            size = self._start << max(0, row - 1)
            begin = first << row - 1 if row else 0
            column = (relative - begin) // size
            if row >= rows:
                raise Damage("an object lies outside its heap")
            child = self._children(address, rows, base)[row * self._width + column]
            base += begin + column * size
            if child == UNDEFINED:
                raise Damage("an object lies in a block that a heap does not have")
            if row < self._direct_rows:
                return child, size, base
            address, rows = child, size.bit_length() - first.bit_length() + 1

    def _children(self, address: int, rows: int, base: int) -> list[int]:
        count = rows * self._width
        size = 13 + self._offset_bytes + 8 * count + CHECKSUM
        fields = self._blocks.block(address, size, b"FHIB", "a block of a heap")
        self._check_head(fields, b"FHIB", base)
        return [fields.address() for _ in range(count)]
