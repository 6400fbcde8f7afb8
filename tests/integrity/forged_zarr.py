"""Zarr stores forged at random: metadata, shards, and items that replace files."""

import hashlib
import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

from teachonce.store.format.manifest import seal_checksum
from tests.integrity.forged_json import mutated, text


def _seal_zarr(path: Path, manifest: bytes, root: dict[str, Any]) -> None:
    array = zarr.create_array(
        path / "manifest", shape=len(manifest), dtype="uint8", compressors=None, overwrite=True
    )
    array[:] = np.frombuffer(manifest, np.uint8)
    root["attributes"].pop("arrays", None)  # repeats the content of the manifest
    root["attributes"]["checksum"] = seal_checksum(manifest, root["attributes"]["created"])
    (path / "zarr.json").write_bytes(text(root))


def _manifest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and the root of a store."""
    manifest = json.loads(np.asarray(zarr.open_array(path / "manifest", mode="r")[:]).tobytes())
    return manifest, json.loads((path / "zarr.json").read_bytes())


def _replace_node(path: Path, file: Path, altered: bytes) -> None:
    """Replace the zarr.json of an array or a group, and its checksum in the manifest."""
    manifest, root = _manifest(path)
    known = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(altered)
    data = text(manifest).replace(known.encode(), hashlib.sha256(altered).hexdigest().encode())
    _seal_zarr(path, data, root)


def forge_node(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter one zarr.json or the manifest, and with it the checksums over it."""
    manifest, root = _manifest(path)
    kind = chance.randrange(4)
    if kind == 0:
        _seal_zarr(path, text(mutated(manifest, chance)), root)
        return "manifest"
    if kind == 1:
        (path / "zarr.json").write_bytes(text(mutated(root, chance)))
        return "root"
    if kind == 2:  # the attributes, equal in both places
        attributes = mutated({"attributes": manifest["attributes"]}, chance).get("attributes")
        root["attributes"] |= attributes if isinstance(attributes, dict) else {}
        _seal_zarr(path, text(manifest | {"attributes": attributes}), root)
        return "attributes"
    file = chance.choice(sorted(path.glob("*/**/zarr.json")))
    _replace_node(path, file, text(mutated(json.loads(file.read_bytes()), chance)))
    return str(file.relative_to(path))


def _codecs(chance: random.Random, depth: int = 0) -> list[Any]:
    """Draw a chain of codecs, some of them nested; a store may use few of them."""
    blosc = {
        "cname": chance.choice(["lz4", "zstd", "zlib", "x"]), "clevel": chance.choice([1, 9, 99]),
        "shuffle": chance.choice(["noshuffle", "bitshuffle", "x"]),
        "typesize": chance.choice([0, 1, 4, 255, 2**31]), "blocksize": chance.choice([0, 2**31]),
    }  # fmt: skip
    shape = [chance.choice([0, 1, 8, 4096, 2**31, 2**62]) for _ in range(chance.randrange(1, 3))]
    nested = depth < 4
    known: list[Any] = [
        {"name": "bytes", "configuration": {"endian": chance.choice(["little", "big", "x"])}},
        {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}, "bytes",
        {"name": "sharding_indexed", "configuration": {
            "chunk_shape": shape, "codecs": _codecs(chance, depth + 1) if nested else [],
            "index_codecs": _codecs(chance, depth + 1) if nested else [],
            "index_location": chance.choice(["start", "end", "x"])}},
        {"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "vlen-utf8"},
        {"name": "gzip", "configuration": {"level": 1}}, {"name": "numcodecs.pickle"}, 7, None,
    ]  # fmt: skip
    return [chance.choice(known) for _ in range(chance.randrange(4))]


def forge_codecs(path: Path, chance: random.Random, outside: Path) -> str:
    """Replace the chunks of an array, and its codecs by a random chain."""
    file = chance.choice(sorted(path.glob("*/**/c")))
    node = json.loads((file.parent / "zarr.json").read_bytes())
    grid = node["chunk_grid"]["configuration"]["chunk_shape"]
    if chance.randrange(2):
        inner = node["codecs"][0]["configuration"]
        inner[chance.choice(["codecs", "index_codecs"])] = _codecs(chance)
    else:
        node["codecs"] = _codecs(chance)
    if chance.randrange(2):
        grid[0] = chance.choice([1, 2, grid[0] * 2, 2**31, 2**62])
    _replace_node(path, file.parent / "zarr.json", text(node))
    return f"codecs of {file.parent.relative_to(path)}"


def forge_shard(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter entries in the index of a shard, or numbers in a chunk, with valid checksums."""
    folder = chance.choice(sorted(path.glob("*/**/c")))
    node = json.loads((folder.parent / "zarr.json").read_bytes())
    inner = node["codecs"][0]["configuration"]["chunk_shape"]
    count = node["chunk_grid"]["configuration"]["chunk_shape"][0] // inner[0]
    file = next(f for f in folder.rglob("*") if f.is_file())
    data, size = bytearray(file.read_bytes()), 16 * count
    end = len(data) - size - 4
    numbers = list(struct.unpack(f"<{2 * count}Q", data[end : end + size]))
    what = chance.choice(["index", "header", "chunk"])
    if what == "index":
        known = [0, 1, 4, len(data), end, 2**63, 2**64 - 1, 2**64 - 16, 2**32, *numbers]
        numbers[chance.randrange(len(numbers))] = chance.choice(known)
    else:
        begin, length = numbers[:2]
        chunk = data[begin : begin + length - 4]
        limit = min(16, len(chunk)) if what == "header" else len(chunk)
        for _ in range(chance.choice([1, 1, 4])):
            chunk[chance.randrange(limit)] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        data[begin : begin + length] = bytes(chunk) + _crc(bytes(chunk))
    index = struct.pack(f"<{2 * count}Q", *numbers)
    file.write_bytes(bytes(data[:end]) + index + _crc(index))
    return f"{what} of {file.relative_to(path)}"


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def forge_tree(path: Path, chance: random.Random, outside: Path) -> str:
    """Add a link, a pipe, a loop, a hole of a terabyte, a folder or a device, in place of a file or
    folder or next to it."""
    target = chance.choice([p for p in sorted(path.rglob("*")) if p.name != "manifest"])
    if chance.randrange(4) == 0:
        target = target.with_name(chance.choice(["..x", ".hidden", "0", "x" * 255, "\udcff", "c"]))
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    links = ["/etc/passwd", "/dev/zero", "/", ".", "..", target.name, "x" * 5000]
    links += [str(outside / name) for name in ("pipe", "secret.h5", "")]
    kind = chance.choice([*links, "pipe", "hole", "folder"])
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "hole":
        target.touch()
        os.truncate(target, 2 ** chance.choice([10, 30, 40]))
    elif kind == "folder":
        target.mkdir()
    elif len(kind) < 4096:
        target.symlink_to(kind)
    return f"{ascii(str(target.relative_to(path)))[:80]} is {kind[:40]}"


WAYS = (*(forge_node,) * 5, *(forge_codecs,) * 4, *(forge_shard,) * 5, *(forge_tree,) * 4)


def forge_zarr(path: Path, chance: random.Random, outside: Path) -> str:
    """Alter a store in one way; return the way."""
    return chance.choice(WAYS)(path, chance, outside)
