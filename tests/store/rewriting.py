"""Rewrite sound stores: plain zarr-python or h5py writes each array again, with other chunks and
other Blosc settings, as FORMAT.md allows; nothing of `store` is used.

`python -m tests.store.rewriting STORE SEED` does it with the zarr of that Python.
"""

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from teachonce.support.arrays import Array


def zarr_array(path: Path) -> Array:
    """Read a whole array with plain zarr-python."""
    return np.asarray(zarr.open_array(path, mode="r")[...])


def write_shard(
    folder: Path, name: str, values: Array, chunks: tuple[int, ...], packing: Any = (), **more: Any
) -> None:
    """Write an array as one shard of chunks with plain zarr-python, as FORMAT.md requires."""
    sizes = zip(values.shape, chunks, strict=True)
    array = zarr.create_array(
        zarr.storage.LocalStore(folder), name=name, shape=values.shape, dtype=values.dtype,
        chunks=chunks, shards=tuple(-(-max(1, size) // chunk) * chunk for size, chunk in sizes),
        compressors=[*packing, Crc32cCodec()], filters=None, fill_value=0,
        config={"write_empty_chunks": True}, **more,
    )  # fmt: skip
    if values.size:
        array[...] = values


def _blosc(draw: random.Random) -> dict[str, Any] | None:
    if draw.random() < 0.4:
        return None
    return {
        "cname": draw.choice(["lz4", "zstd", "zlib", "lz4hc"]),
        "clevel": draw.randint(0, 7),
        "shuffle": draw.choice(["noshuffle", "shuffle", "bitshuffle"]),
    }


def _chunks(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Draw chunks of rows and, sometimes, of columns."""
    row = [draw.randint(1, n) if draw.random() < 0.3 else n for n in shape[1:]]
    return draw.choice([1, 3, 7, shape[0] // 2, shape[0], 2 * shape[0]]) or 1, *row


def _write_zarr(folder: Path, name: str, values: Array, draw: random.Random) -> None:
    shutil.rmtree(folder / name)
    chunks = _chunks(draw, tuple(max(1, size) for size in values.shape))
    if values.size > 10**5:  # chunks of one row would be a hundred thousand
        chunks = (values.shape[0] // 3, *chunks[1:])
    blosc = _blosc(draw)
    write_shard(folder, name, values, chunks, [BloscCodec(**blosc)] if blosc else [])


def rewrite_zarr(folder: Path, seed: int = 0) -> None:
    """Write every array of a Zarr store again, and its manifest without `zarr_json`."""
    draw = random.Random(seed)
    root = json.loads((folder / "zarr.json").read_text())
    manifest = json.loads(zarr_array(folder / "manifest").tobytes())
    for part in [manifest, *manifest["parts"]]:
        place = f"parts/{part['part']}/" if part is not manifest else ""
        for name, entry in part["arrays"].items():
            _write_zarr(folder, place + name, zarr_array(folder / place / name), draw)
            del entry["zarr_json"]
        if place:
            node = json.loads((folder / place / "zarr.json").read_text())
            node["attributes"]["part"] = part
            (folder / place / "zarr.json").write_text(json.dumps(node))
    seal_again(folder, root["attributes"] | {"arrays": manifest["arrays"]}, manifest, draw)


def seal_again(
    folder: Path, attributes: dict[str, Any], manifest: dict[str, Any], draw: random.Random
) -> None:
    """Write this manifest and these root attributes to a Zarr store, with their checksum."""
    data = json.dumps(manifest, sort_keys=True).encode()
    _write_zarr(folder, "manifest", np.frombuffer(data, np.uint8), draw)
    checksum = hashlib.sha256(data + attributes["created"].encode()).hexdigest()
    node = json.loads((folder / "zarr.json").read_text())
    node["attributes"] = attributes | {"checksum": checksum}
    (folder / "zarr.json").write_text(json.dumps(node))


def rewrite_h5(path: Path, seed: int = 0) -> None:
    """Write every dataset of an HDF5 store again, and the SHA-256 at its end."""
    draw, new = random.Random(seed), path.with_suffix(".new")

    def copy(name: str, thing: Any) -> None:
        if isinstance(thing, h5py.Group):
            made = target.create_group(name)
            for key, value in thing.attrs.items():
                made.attrs[key] = value
            return
        settings: dict[str, Any] = {}
        if thing.size:
            chunks = _chunks(draw, thing.shape)
            if thing.size > 10**5:
                chunks = (thing.shape[0] // 3, *chunks[1:])
            settings = {
                "chunks": tuple(min(pair) for pair in zip(chunks, thing.shape, strict=True)),
                "fletcher32": True,
            }
            if blosc := _blosc(draw):
                kind = getattr(hdf5plugin.Blosc, blosc["shuffle"].upper())
                settings |= hdf5plugin.Blosc(blosc["cname"], blosc["clevel"], kind)
        target.create_dataset(name, data=thing[...], **settings)

    with h5py.File(path) as source, h5py.File(new, "w", libver=("v110", "v110")) as target:
        for key, value in source.attrs.items():
            target.attrs[key] = value
        source.visititems(copy)
    data = new.read_bytes()
    new.write_bytes(data + hashlib.sha256(data).digest())
    new.replace(path)


if __name__ == "__main__":
    rewrite_zarr(Path(sys.argv[1]), int(sys.argv[2]))
    print(zarr.__version__)
