"""Read objects of an HDF5 file: their messages, links, attributes and types."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.hdf5.blocks import (
    CHECKSUM,
    MAX_BLOCK,
    UNDEFINED,
    Blocks,
    FieldReader,
)
from teachonce.store.containers.hdf5.heaps import BTree, Heap

SPACE, LINK_INFO, TYPE, LINK, EXTERNAL, LAYOUT = 1, 2, 3, 6, 7, 8
FILTERS, ATTRIBUTE, CONTINUED, OLD_GROUP, ATTRIBUTE_INFO = 11, 12, 16, 17, 21
HARD, NAMES, ATTRIBUTES = 0, 5, 8  # hard links; B-tree types for link names, attributes
# The limits of an object's header and of dimensions are in FORMAT.md, section 3.
MAX_HEADER = 2**22  # bytes of the messages of one object
MAX_HEAPED = 2 * MAX_BLOCK  # bytes in heaps: JSON of the root, or names of all links of a group
MAX_RANK = 32
HEADER = "the header of an object"
NUMBER, FLOAT, TEXT, ENUM = 0, 1, 3, 8  # classes of types


@dataclass
class Object:
    """Holds the header of an object: the bodies of its messages by type."""

    address: int
    messages: dict[int, list[bytes]] = field(default_factory=dict)

    def one(self, kind: int, subject: str) -> FieldReader:
        """Return the body of a message that must occur once."""
        bodies = self.messages.get(kind, [])
        if len(bodies) != 1:
            raise Damage(f"{subject} occurs {len(bodies)} times, expected once")
        return FieldReader(bodies[0], subject)

    @property
    def is_dataset(self) -> bool:
        return LAYOUT in self.messages or SPACE in self.messages


def read_object(blocks: Blocks, address: int) -> Object:
    """Read the header of an object. Raises Damage."""
    thing, visited, total = Object(address), {address}, 0
    signature, first, sizes = _header(blocks, address)
    todo = [first]
    while todo:
        fields = todo.pop(0)
        total += fields.left
        if total > MAX_HEADER:
            raise Damage(f"the header of an object has more than {MAX_HEADER:,} bytes")
        for kind, body in _messages(fields, *sizes):
            if kind == CONTINUED:
                start, length = body.address(), body.number(8)
                if start in visited:
                    raise Damage("the header of an object continues in itself")
                visited.add(start)
                todo.append(
                    blocks.block(start, length, signature, HEADER)
                    if signature
                    else FieldReader(blocks.read(start, length, HEADER), HEADER)
                )
            else:
                thing.messages.setdefault(kind, []).append(body.take(body.left))
    return thing


def _header(blocks: Blocks, address: int) -> tuple[bytes, FieldReader, tuple[int, int]]:
    """Read the start of the header of an object.

    Returns the signature of its continuation blocks, its first messages, and two numbers of bytes:
    of the type of a message, and of the fields between a message's size and its body.
    """
    # HDF5 writes headers of version 1 into a file of version 2 that it opens again.
    if blocks.read(address, 4, HEADER) != b"OHDR":
        fields = FieldReader(blocks.read(address, 16, HEADER), HEADER)
        fields.expect("its version", 1, 1)
        fields.take(7)
        return b"", FieldReader(blocks.read(address + 16, fields.number(4), HEADER), HEADER), (2, 4)
    fields = FieldReader(blocks.read(address + 4, 2, HEADER), HEADER)
    fields.expect("its version", 1, 2)
    flags = fields.number(1)
    # Bit 5 adds four timestamps of 4 bytes, bit 4 two limits of 2 bytes for attributes.
    offset, width = 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0), 1 << (flags & 3)
    size = FieldReader(blocks.read(address + offset, width, HEADER), HEADER).number(width)
    fields = blocks.block(address, offset + width + size + CHECKSUM, b"OHDR", HEADER)
    fields.take(offset + width - 4)
    # Bit 2 adds to each message the order of its creation, 2 bytes.
    return b"OCHK", fields, (1, 3 if flags & 4 else 1)


def _messages(
    fields: FieldReader, kind_bytes: int, marks_bytes: int
) -> Iterator[tuple[int, FieldReader]]:
    while fields.left >= kind_bytes + 2 + marks_bytes:  # fewer bytes are a gap
        kind, size, marks = (fields.number(n) for n in (kind_bytes, 2, marks_bytes))
        body = fields.take(size)
        if marks & 2:
            raise Damage("a message is shared, which is not followed")
        yield kind, FieldReader(body, f"message {kind} of an object")


def links(blocks: Blocks, group: Object) -> dict[str, tuple[int, int]]:
    """Return kind and address of each link of a group by its name. Raises Damage."""
    if OLD_GROUP in group.messages:
        raise Damage("a group is not of HDF5 1.10 or later")
    by_name: dict[str, tuple[int, int]] = {}
    bodies = [*group.messages.get(LINK, []), *_heaped(blocks, group, LINK_INFO, NAMES)]
    for body in bodies:
        name, kind, address = _link(FieldReader(body, "a link"))
        if name in by_name or "/" in name or name in ("", ".", ".."):
            raise Damage(f"link {name!r} occurs twice, or cannot be a name")
        by_name[name] = kind, address
    return by_name


def _heaped(blocks: Blocks, thing: Object, kind: int, tree: int) -> Iterator[bytes]:
    """Yield the objects of the heap to which an info message of links or attributes points. kind:
    type of the message. tree: type of the heap's B-tree."""
    for body in thing.messages.get(kind, []):
        fields = FieldReader(body, "where links or attributes are")
        fields.expect("its version", 1, 0)
        flags = fields.number(1)
        # The highest order of creation has 8 bytes for links and 2 for attributes.
        fields.take((8 if kind == LINK_INFO else 2) if flags & 1 else 0)
        heap, names = fields.address(), fields.address()
        if heap == UNDEFINED:
            continue
        objects, total = Heap(blocks, heap), 0
        for record in BTree(blocks, names, tree).records():
            if tree == NAMES:
                record.take(4)  # the hash of the name
            body = objects.get(record)
            total += len(body)
            if total > MAX_HEAPED:  # objects may share the same bytes of the file
                raise Damage(f"links or attributes take more than {MAX_HEAPED:,} bytes")
            yield body


def _link(fields: FieldReader) -> tuple[str, int, int]:
    fields.expect("its version", 1, 1)
    flags = fields.number(1)
    kind = fields.number(1) if flags & 8 else HARD
    # Bit 2 adds the order of creation, bit 4 the encoding of the name.
    fields.take((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
    name = _text(fields.take(fields.number(1 << (flags & 3))))
    return name, kind, fields.address() if kind == HARD else UNDEFINED


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damage("a name is not UTF-8") from error


def attributes(blocks: Blocks, thing: Object) -> dict[str, bytes | int | str]:
    """Return the attributes of an object by name. Raises Damage.

    A value is the bytes of a text, a whole number, or, for a type that no store has, its
    description (str).
    """
    values: dict[str, bytes | int | str] = {}
    bodies = [*thing.messages.get(ATTRIBUTE, [])]
    for body in [*bodies, *_heaped(blocks, thing, ATTRIBUTE_INFO, ATTRIBUTES)]:
        fields = FieldReader(body, "an attribute")
        version = fields.expect("its version", 1, 1, 2, 3)
        fields.expect("the sharing of its type", 1, 0)
        sizes = [fields.number(2) for _ in range(3)]
        fields.take(1 if version == 3 else 0)  # the encoding of its name
        # Version 1 pads name, type and shape to multiples of 8 bytes.
        parts = [fields.take(-(-size // 8) * 8 if version == 1 else size) for size in sizes]
        name = _text(parts[0][: sizes[0]].rstrip(b"\0"))
        if name in values:
            raise Damage(f"attribute {name!r} occurs twice")
        kind = FieldReader(parts[1][: sizes[1]], f"the type of attribute {name!r}")
        try:
            shape = dataspace(FieldReader(parts[2], "the shape of an attribute"))
            values[name] = _value(fields, kind, shape)
        except Damage as error:
            values[name] = str(error)
    return values


def _value(fields: FieldReader, kind: FieldReader, shape: tuple[int, ...]) -> bytes | int | str:
    if shape != ():
        return f"an array of shape {list(shape)} is neither a string nor a whole number"
    dtype = type_of(kind)
    data = fields.take(dtype.itemsize)
    if dtype.kind == "S":
        return data.rstrip(b"\0")
    if dtype.kind in "iu":
        return int(np.frombuffer(data, dtype)[0])
    return f"{dtype} is neither a string nor a whole number"


def dataspace(fields: FieldReader) -> tuple[int, ...]:
    """Read the shape of an array. Raises Damage for an array that may grow, and for an invalid
    shape."""
    version = fields.expect("its version", 1, 1, 2)
    rank, flags, kind = (fields.number(1) for _ in range(3))
    if version == 1:
        kind = min(rank, 1)
        fields.take(4)
    if rank > MAX_RANK or kind not in (0, 1) or (kind == 0) != (rank == 0):
        raise Damage(f"{fields.subject} is not valid")
    shape = tuple(fields.number(8) for _ in range(rank))
    if flags & 1 and shape != tuple(fields.number(8) for _ in range(rank)):
        raise Damage(f"{fields.subject} may grow")
    return shape


def _numbers() -> dict[tuple[int, bytes], np.dtype[Any]]:
    """Return the dtypes of little-endian numbers by class and description in the file."""
    dtypes: dict[tuple[int, bytes], np.dtype[Any]] = {}
    for size in (1, 2, 4, 8):
        for sign, name in ((0, "uint"), (8, "int")):
            form = struct.pack("<B2xIHH", sign, size, 0, 8 * size)
            # All bytes must match: another byte order, padding or bit offset is another type.
            dtypes[NUMBER, form] = np.dtype(f"{name}{8 * size}")
    for size in (2, 4, 8):
        dtype = np.dtype(f"float{8 * size}")
        info = np.finfo(dtype)
        last, fraction, exponent = 8 * size - 1, int(info.nmant), int(info.iexp)
        bias = 2 ** (exponent - 1) - 1
        bit_fields = (0, 8 * size, fraction, exponent, 0, fraction, bias)
        dtypes[FLOAT, struct.pack("<BBxIHHBBBBI", 32, last, size, *bit_fields)] = dtype
    return dtypes


NUMBERS = _numbers()
FORM_BYTES = {NUMBER: 11, FLOAT: 19}
# What h5py writes for bool: an enumeration of int8.
BOOL = struct.pack("<H1xI", 2, 1)
INT8 = struct.pack("<B2xIHH", 8, 1, 0, 8)
# Types before version 3 pad each name to a multiple of 8 bytes.
VALUES = b"FALSE\0TRUE\0\0\1", b"FALSE\0\0\0TRUE\0\0\0\0\0\1"


def type_of(fields: FieldReader) -> np.dtype[Any]:
    """Read a type. Raises Damage for all but little-endian numbers, bool and fixed-length text."""
    first = fields.number(1)
    kind, body = first & 15, fields.take(fields.left)
    if 1 <= first >> 4 <= 5:
        size = int.from_bytes(body[3:7], "little")
        dtype = NUMBERS.get((kind, body[: FORM_BYTES.get(kind, 0)]))
        if dtype is not None:  # the rest of the body is padding to a multiple of 8 bytes
            return dtype
        if kind == TEXT and size <= MAX_BLOCK:
            return np.dtype(f"S{size}")
        if kind == ENUM and (body[:7], body[8:19]) == (BOOL, INT8) and body[19:].startswith(VALUES):
            return np.dtype(bool)
    raise Damage(
        f"{fields.subject} is not a little-endian number, bool or fixed-length text (class {kind})"
    )
