"""Single arrays as Zarr shards, and functions that alter them with their checksums."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec

from teachonce.store.containers.zarr import tree
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.support.arrays import Array
from tests.store.rewriting import write_shard

Shuffle = Literal["noshuffle", "shuffle", "bitshuffle"]


def blosc(
    cname: Literal["lz4", "zstd"], shuffle: Shuffle, typesize: int = 4, blocksize: int = 0
) -> BloscCodec:
    return BloscCodec(
        cname=cname, clevel=1, shuffle=shuffle, typesize=typesize, blocksize=blocksize
    )


def write(folder: Path, values: Array, rows: int, packing: list[Any]) -> Path:
    """Write an array `a` in a group, as one shard of chunks of `rows` rows."""
    shutil.rmtree(folder, ignore_errors=True)
    zarr.create_group(folder)
    write_shard(folder, "a", values, (rows, *values.shape[1:]), packing)
    return folder


def both(folder: Path) -> tuple[Any, Any]:
    """Read the array with our reader and with zarr-python."""
    ours = ZarrSource(str(folder)).array("a")
    with by_zarr_python():
        return ours, ZarrSource(str(folder)).array("a")


@contextmanager
def by_zarr_python() -> Iterator[None]:
    """Read arrays that are opened in this context with zarr-python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "shard_layout", lambda node: None)
        yield


def random_values(dtype: str, shape: tuple[int, ...], seed: int, levels: int) -> Array:
    """Fewer levels compress better; with 256 levels Blosc stores the bytes uncompressed."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, levels, size, np.uint8)
    return (
        (data & 1).view(bool).reshape(shape) if dtype == "bool" else data.view(dtype).reshape(shape)
    )


def index_of(file: Path, chunks: int = 5) -> Array:
    data = file.read_bytes()
    return np.frombuffer(data[-4 - 16 * chunks : -4], "<u8").reshape(-1, 2).copy()


def put_index(file: Path, index: Array) -> None:
    data, table = file.read_bytes(), index.astype("<u8").tobytes()
    crc = google_crc32c.value(table).to_bytes(4, "little")
    file.write_bytes(data[: -4 - len(table)] + table + crc)


def put_chunk(file: Path, number: int, change: Callable[[bytearray], None]) -> None:
    """Alter a chunk in place, and its checksum with it."""
    begin, size = (int(n) for n in index_of(file)[number])
    data = bytearray(file.read_bytes())
    chunk = data[begin : begin + size - 4]
    change(chunk)
    data[begin : begin + size] = chunk + google_crc32c.value(bytes(chunk)).to_bytes(4, "little")
    file.write_bytes(data)
