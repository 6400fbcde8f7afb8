"""Read blocks of HDF5 metadata from a memory map of the file. Each block that is returned lies in
the file and matches its checksum. Terms are those of the HDF5 File Format Specification 3.0."""

# We read HDF5 ourselves because no library is both complete and safe. pyfive 1.3 does not support
# the chunk indices that HDF5 writes since 1.10, so it reads no array of a store. It compares no
# checksum of metadata. HDF5's own library crashed on 2 of 3,000 forged files; in a process of its
# own it costs 0.2 s for each process that opens a store (benchmarks/RESULTS.md, "Other readers of
# HDF5").

from __future__ import annotations

from numcodecs.jenkins import jenkins_lookup3

from teachonce.store.containers.blosc import Bytes, Damage
from teachonce.store.containers.memory_map import FileMap
from teachonce.store.containers.untrusted import MAX_JSON

UNDEFINED = 2**64 - 1  # an address that leads nowhere
CHECKSUM = 4
MAX_BLOCK = MAX_JSON + 2**20  # an attribute of the root is the largest: JSON and its name
SUPERBLOCK = b"\x89HDF\r\n\x1a\n"


class FieldReader:
    """Reads the fields of a block one after the other. Raises Damage beyond its end."""

    def __init__(self, data: bytes, subject: str) -> None:
        self._data, self._offset, self.subject = data, 0, subject

    @property
    def left(self) -> int:
        """Return the number of bytes not read yet."""
        return len(self._data) - self._offset

    def take(self, size: int) -> bytes:
        """Take the next `size` bytes."""
        if size > self.left:
            raise Damage(f"{self.subject} is truncated")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def number(self, size: int) -> int:
        """Read the next `size` bytes as a whole number."""
        return int.from_bytes(self.take(size), "little")

    def address(self) -> int:
        return self.number(8)

    def expect(self, field: str, size: int, *valid: int) -> int:
        """Read a number, and raise Damage unless it is one that this reader supports."""
        if (value := self.number(size)) not in valid:
            raise Damage(
                f"{self.subject}: {field} is {value}, expected {' or '.join(map(str, valid))}"
            )
        return value


class Blocks:
    """Reads an HDF5 file's bytes, and the address of its root group. Raises Damage, OSError."""

    def __init__(self, path: str) -> None:
        self.map = FileMap(path)
        self._end = len(self.map.data)
        fields = FieldReader(self.read(0, 9, "the superblock"), "the superblock")
        if fields.take(8) != SUPERBLOCK:
            raise Damage("it does not begin with the HDF5 signature")
        if fields.number(1) not in (2, 3):
            raise Damage("its metadata are older than HDF5 1.10 and have no checksums")
        fields = self.block(0, 48, SUPERBLOCK, "the superblock")
        fields.expect("its version", 1, 2, 3)
        fields.expect("the size of an address", 1, 8)
        fields.expect("the size of a length", 1, 8)
        fields.expect("the mark of a writer that did not end", 1, 0)
        # A user block before the superblock, which FORMAT.md excludes, would shift all addresses.
        fields.expect("the base address", 8, 0)
        fields.address()  # of an extension, which a store does not need
        end = fields.number(8)
        # The file may be longer, because the SHA-256 of a sealed store follows this end.
        if end > self._end:
            raise Damage(f"the file has {self._end} bytes, expected {end}")
        self._end, self.root = end, fields.address()

    def raw(self, address: int, size: int, subject: str) -> Bytes:
        """Return `size` bytes of the file from `address`, as a view of the memory map. Raises
        Damage if they lie outside the file."""
        if address + size > self._end:
            raise Damage(f"{subject} lies outside the file")
        return self.map.data[address : address + size]

    def read(self, address: int, size: int, subject: str) -> bytes:
        """Return a copy of `size` bytes of metadata. Raises Damage for more than MAX_BLOCK."""
        if size > MAX_BLOCK:
            raise Damage(f"{subject} has {size:,} bytes, more than {MAX_BLOCK:,}")
        return self.raw(address, size, subject).tobytes()

    def block(self, address: int, size: int, signature: bytes, subject: str) -> FieldReader:
        """Read the fields between the signature of a block and the checksum at its end."""
        data = self.read(address, size, subject)
        if data[: len(signature)] != signature:
            raise Damage(f"{subject} does not begin with {signature.decode('latin-1')}")
        check_sum(data[:-CHECKSUM], data[-CHECKSUM:], subject)
        return FieldReader(data[len(signature) : -CHECKSUM], subject)


def check_sum(data: bytes, stored: bytes, subject: str) -> None:
    """Raise Damage if a block does not match its checksum."""
    if jenkins_lookup3(data, 0) != int.from_bytes(stored, "little"):
        raise Damage(f"{subject} does not match its checksum")
