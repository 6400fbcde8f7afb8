"""HDF5 stores forged at random with valid checksums, by HDF5's own library and by block."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numcodecs import Fletcher32
from numcodecs.jenkins import jenkins_lookup3

from teachonce.store.containers.hdf5.blocks import Blocks, FieldReader
from teachonce.store.containers.hdf5.chunks import FLETCHER, Dataset, read_dataset
from teachonce.store.containers.hdf5.file import DIGEST_BYTES, append_digest, write_attributes
from teachonce.store.containers.hdf5.tree import Hdf5File, Hdf5Source
from teachonce.store.format.manifest import seal_checksum
from tests.integrity.forged_json import mutated, text

VERSIONS: tuple[Any, ...] = ("earliest", "latest", ("v110", "v110"))
Way = Callable[[Path, random.Random, Path], str]


class _Recorder(Blocks):
    """Record the positions of the metadata blocks that were read, and of their checksums."""

    def __init__(self, path: Path) -> None:
        self.met: dict[int, tuple[int, int]] = {}
        super().__init__(str(path))

    def block(self, address: int, size: int, signature: bytes, subject: str) -> FieldReader:
        self.met[address] = size, size - 4
        return super().block(address, size, signature, subject)

    def read(self, address: int, size: int, subject: str) -> bytes:
        data = super().read(address, size, subject)
        if data[:4] == b"FHDB":
            self.met[address] = size, 13 + 5  # the heap of attributes has offsets of 40 bits
        return data


@cache
def _anatomy(path: Path) -> tuple[dict[int, tuple[int, int]], list[Dataset]]:
    """Return the blocks of a file, and its datasets."""
    file = Hdf5File(str(path))
    file.blocks = recorder = _Recorder(path)
    datasets = []
    for name, thing in file.walk(""):
        for depth in range(name.count("/") + 1):
            file.attributes(name.rsplit("/", depth + 1)[0] if "/" in name else "")
        if thing is not None:
            datasets.append(read_dataset(recorder, thing, name, is_json=False))
    file.attributes("")
    return recorder.met, [found for found in datasets if found.stored]


def _write_again(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-DIGEST_BYTES])
    append_digest(path)


def _altered(old: bytes, chance: random.Random, known: list[int]) -> bytes:
    """Replace one number in some bytes by another, such as the address of another block."""
    width = min(chance.choice([1, 1, 2, 4, 8, 8]), len(old))
    place = chance.randrange(len(old) - width + 1)
    value = int.from_bytes(old[place : place + width], "little")
    others = [0, 1, 2**7, 2**15, 2**31, 2**40, 2**63, 2**64 - 1, value + 1, value - 1, 2 * value]
    others += [chance.randrange(256), chance.choice(known), chance.randrange(2**32)]
    found = (chance.choice(others) % (1 << 8 * width)).to_bytes(width, "little")
    return old[:place] + found + old[place + width :]


def forge_block(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter numbers in a block of metadata."""
    blocks, _ = _anatomy(path)
    data = bytearray(path.read_bytes())
    address = chance.choice(list(blocks))
    size, at = blocks[address]
    block = bytes(data[address : address + size])
    for _ in range(chance.choice([1, 1, 2, 5])):
        block = _altered(block, chance, [len(data), *blocks])
    plain = block[:at] + (b"" if at == size - 4 else bytes(4) + block[at + 4 :])
    fitting = jenkins_lookup3(plain, 0).to_bytes(4, "little")
    data[address : address + size] = block[:at] + fitting + block[at + 4 :]
    _write_again(path, bytes(data))
    return f"block {block[:4]!r} at {address}"


def forge_chunk(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter numbers in the bytes of a chunk, including its Blosc header."""
    dataset = chance.choice(_anatomy(path)[1])
    data = bytearray(path.read_bytes())
    address, size, _ = chance.choice(dataset.places.tolist())
    checked = FLETCHER in dataset.filters
    chunk = bytes(data[address : address + size - 4 * checked])
    for _ in range(chance.choice([1, 1, 3])):
        head = 32 if chance.randrange(2) else len(chunk)
        chunk = _altered(chunk[:head], chance, [len(chunk)]) + chunk[head:]
    stored = Fletcher32().encode(np.frombuffer(chunk, np.uint8)) if checked else chunk
    data[address : address + size] = bytes(stored)
    _write_again(path, bytes(data))
    return f"chunk of {dataset.dtype}{list(dataset.shape)}"


def _other_dataset(
    name: str, old: h5py.Dataset, chance: random.Random, outside: Path
) -> Callable[[h5py.File], object]:
    """Create another dataset in place of an existing one."""
    shape, dtype, values = old.shape, old.dtype, old[...]
    whole, secret = tuple(max(1, size) for size in shape), outside / "secret.h5"
    settings: list[dict[str, Any]] = [
        {"shape": (2**40, *shape[1:]), "dtype": dtype, "chunks": True},
        {"shape": (2**45,), "dtype": dtype, "chunks": (2**20,)},
        {"shape": (2**26,), "dtype": "u1", "chunks": (1,)},
        {"shape": shape, "dtype": "S9"},
        {"shape": shape, "dtype": ">i8"},
        {"shape": shape, "dtype": h5py.string_dtype()},
        {"shape": shape, "dtype": h5py.vlen_dtype(np.int32)},
        {"shape": (), "dtype": dtype},
        {"shape": shape, "dtype": np.dtype([("a", "i4"), ("b", "f8")])},
        {"shape": shape, "dtype": h5py.ref_dtype},
        {"shape": shape, "dtype": dtype, "external": [(str(outside / "pipe"), 0, 2**20)]},
        {"shape": shape, "dtype": dtype, "external": [(str(secret), 0, 2**20)]},
        {"data": values, "chunks": whole, "maxshape": (None,) * len(shape)},
        {"data": values, "chunks": tuple(-(-size // 2) for size in whole), "compression": "gzip"},
        {"data": values, "chunks": whole, "shuffle": True, "fletcher32": True},
        {"data": values, "chunks": whole, "compression": "lzf"},
        {"shape": shape, "dtype": dtype, "chunks": whole, "fillvalue": 1},
        {"data": values},
    ]
    if len(shape) and chance.randrange(8) == 0:
        layout = h5py.VirtualLayout(shape, dtype)
        layout[...] = h5py.VirtualSource(str(secret), "ids", shape)
        return lambda file: file.create_virtual_dataset(name, layout)
    chosen = chance.choice(settings)
    return lambda file: file.create_dataset(name, **chosen)


def forge_object(path: Path, chance: random.Random, outside: Path) -> str:
    """Replace a dataset, link, group or attribute by another, or add one."""
    with h5py.File(path, "r+", libver=chance.choice(VERSIONS)) as file:
        names: list[str] = []
        file.visit(names.append)
        name, kind = chance.choice(names), chance.randrange(5)
        there = file[name]
        if kind < 2 and isinstance(there, h5py.Dataset):
            make = _other_dataset(name, there, chance, outside)
            del file[name]
            with suppress(Exception):  # no forger can create items that HDF5 refuses
                make(file)
            return f"{name} is another dataset"
        if kind == 2:
            for number in range(chance.choice([1, 9, 300])):
                key, value = chance.choice(_ATTRIBUTES)
                with suppress(Exception):
                    there.attrs.create(f"{key}{number}", value)
            return f"{name} has attributes"
        if kind == 3:
            for number in range(chance.choice([1, 9, 300])):
                file.create_group(f"{name.rpartition('/')[0]}/more{number}")
            return f"{name} has neighbours"
        link: Any = chance.choice(
            [
                h5py.SoftLink("/"), h5py.SoftLink(name), h5py.SoftLink(chance.choice(names)),
                h5py.ExternalLink(str(outside / "pipe"), "/"), h5py.ExternalLink("/dev/zero", "/"),
                h5py.ExternalLink(str(outside / "secret.h5"), "/"), file["/"],
                file[chance.choice(names)], there,
            ]
        )  # fmt: skip
        place = name if chance.randrange(4) else f"{name.rpartition('/')[0]}/extra"
        if place in file:
            del file[place]
        file[place] = link
    return f"{place} is a link"


_ATTRIBUTES: list[tuple[str, Any]] = [
    ("part", 5), ("text", "of any length"), ("many", np.arange(999)), ("large", "x" * 70_000),
    ("pair", np.zeros(2, [("a", "i4"), ("b", "f8")])), ("none", h5py.Empty("f4")), ("é", b"{"),
]  # fmt: skip


def forge_attributes(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter attributes or the manifest, and with them the checksums over them."""
    attributes = Hdf5Source(str(path)).attributes()
    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        data = file["manifest"][:].tobytes()
        kind = chance.randrange(4)
        if kind == 0:
            data = text(mutated(json.loads(data), chance))
        elif kind == 1:
            group = file[chance.choice([n for n in ["/", *names] if len(file[n].attrs)])]
            key = chance.choice(list(group.attrs))
            group.attrs.create(
                key,
                chance.choice([5, 1.5, "text", b"{", [1, 2], np.zeros((3, 3)), h5py.Empty("f4")]),
            )
        elif kind == 2:
            altered = mutated({k: v for k, v in attributes.items() if k != "checksum"}, chance)
            for key in altered:
                with suppress(Exception):  # no forger can write values that HDF5 cannot store
                    write_attributes(file, {key: altered[key]})
            data = text(json.loads(data) | {"attributes": altered})
        else:
            data = _long_text(file, json.loads(data), chance.choice([2**20, 2**26, 2**33, 2**45]))
        del file["manifest"]
        if "arrays" in file.attrs:
            del file.attrs["arrays"]
        file["manifest"] = np.frombuffer(data, np.uint8)
        created = file.attrs.get("created")
        if isinstance(created, bytes):
            checksum = seal_checksum(data, created.decode("ascii", "replace"))
            file.attrs.create("checksum", np.bytes_(checksum))
    return f"attributes, kind {kind}"


def _long_text(file: h5py.File, manifest: dict[str, Any], size: int) -> bytes:
    """Declare a text of any size everywhere, and store no bytes of it."""
    part = manifest["parts"][0]
    part["counts"]["text_bytes"] = size
    part["arrays"]["text/utf8"]["shape"] = [size]
    del file["parts/0/text/utf8"]
    file.create_dataset("parts/0/text/utf8", (size,), "u1", chunks=(min(size, 2**20),))
    return text(manifest)


def forge_start(path: Path, chance: random.Random, outside: Path) -> str:
    """Add a user block before the file, truncate the file, or repeat it."""
    data, kind = path.read_bytes(), chance.randrange(3)
    other = (bytes(512) + data, data[: chance.randrange(len(data))], data + data)[kind]
    path.write_bytes(other)
    return f"start, kind {kind}"


WAYS: tuple[Way, ...] = (
    *(forge_block,) * 10, *(forge_chunk,) * 3, *(forge_object,) * 4, *(forge_attributes,) * 3,
    forge_start,
)  # fmt: skip


def forge_hdf5(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter a store in one way; return the way."""
    way = chance.choice(WAYS)
    what = way(path, chance, outside)
    if way in (forge_object, forge_attributes):  # HDF5 has cut off the bytes after its end
        append_digest(path)
    return what
