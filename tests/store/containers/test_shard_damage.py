"""A damaged or forged shard is refused with one line; its sound chunks are still read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from teachonce.store import StoreError
from teachonce.store.containers.interface import damaged_chunks
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.support.arrays import Array
from tests.store.containers.shard_files import (
    blosc,
    both,
    index_of,
    put_chunk,
    put_index,
    random_values,
    write,
)


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Path, Array]:
    """Make a store with one array of 5 chunks of 8 blocks; return it, its shard, its values."""
    values = random_values("uint32", (5000, 4), 3, 5)
    folder = write(tmp_path / "a.zarr", values, 1000, [blosc("zstd", "noshuffle", 4, 2048)])
    file = folder / "a/c/0/0"
    begin = int(index_of(file)[0, 0])
    assert struct.unpack_from("<4xII", file.read_bytes(), begin) == (16000, 2048)
    return folder, file, values


def test_every_flipped_byte_is_found(shard: tuple[Path, Path, Array]) -> None:
    folder, file, values = shard
    sound = file.read_bytes()
    for byte in range(0, len(sound), 97):
        file.write_bytes(sound[:byte] + bytes([sound[byte] ^ 16]) + sound[byte + 1 :])
        with pytest.raises(StoreError, match=r"rows 0\.\.5000 cannot be decoded .*verify"):
            both(folder)[0].read(0, 5000)
    file.write_bytes(sound)
    assert (both(folder)[0].read(0, 5000) == values).all()


def test_damage_is_named_and_leaves_the_rest_readable(shard: tuple[Path, Path, Array]) -> None:
    folder, file, values = shard
    put = bytearray(file.read_bytes())
    put[int(index_of(file)[2, 0]) + 50] ^= 1
    file.write_bytes(put)
    ours, _ = both(folder)
    assert (ours.read(0, 2000) == values[:2000]).all()
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            ours.read(1999, 2001)
    assert str(caught.value) == (
        f"{folder}: array a: rows 1999..2001 cannot be decoded "
        f"(chunk 2 does not match its checksum); run `feature-store verify {folder}`"
    )
    assert damaged_chunks(ZarrSource(str(folder)).array("a")) == [2]


def lie(field: int, value: int) -> Callable[[bytearray], None]:
    """Overwrite a size in the Blosc header: bytes decoded (4), of a block (8), encoded (12)."""
    return lambda chunk: struct.pack_into("<I", chunk, field, value)


@pytest.mark.parametrize(
    "change",
    [lie(4, 2**31), lie(4, 15999), lie(8, 0), lie(8, 2**31), lie(8, 1), lie(12, 2**31), lie(12, 40),
     lambda chunk: struct.pack_into("<8i", chunk, 16, *[2**31 - 1] * 8),
     lambda chunk: struct.pack_into("<8i", chunk, 16, *range(48, 56)),
     lambda chunk: chunk.__setitem__(0, 9), lambda chunk: chunk.__delitem__(slice(9, None))],
)  # fmt: skip
@pytest.mark.parametrize("rows", [(0, 1000), (3, 9), (500, 1000)])
def test_lying_frames_are_refused(
    shard: tuple[Path, Path, Array], change: Callable[[bytearray], None], rows: tuple[int, int]
) -> None:
    folder, file, values = shard
    index = index_of(file)
    put_chunk(file, 0, lambda chunk: None)
    begin, size = (int(n) for n in index[0])
    chunk = bytearray(file.read_bytes()[begin : begin + size - 4])
    change(chunk)
    data = file.read_bytes() + chunk + google_crc32c.value(bytes(chunk)).to_bytes(4, "little")
    file.write_bytes(data + bytes(16 * 5 + 4))
    index[0] = len(data) - len(chunk) - 4, len(chunk) + 4
    put_index(file, index)
    ours, _ = both(folder)
    with pytest.raises(StoreError, match=r"\(chunk 0"):
        ours.read(*rows)
    assert (ours.read(1000, 5000) == values[1000:]).all()


@pytest.mark.parametrize(
    "entry", [(2**64 - 1, 2**64 - 1), (0, 2**63), (2**63, 8), (2**64 - 8, 16), (10**6, 50), (0, 0)]
)
def test_an_index_never_leads_out_of_the_file(
    shard: tuple[Path, Path, Array], entry: tuple[int, int]
) -> None:
    folder, file, values = shard
    index = index_of(file)
    index[3] = entry
    put_index(file, index)
    ours, _ = both(folder)
    with pytest.raises(StoreError, match="chunk 3 is missing or lies outside the file"):
        ours.read(0, 5000)
    assert (ours.read(0, 3000) == values[:3000]).all()


def test_truncated_files(shard: tuple[Path, Path, Array]) -> None:
    folder, file, _ = shard
    sound = file.read_bytes()
    for size in (0, 1, 20, 84, 85, len(sound) // 2, len(sound) - 1):
        file.write_bytes(sound[:size])
        with pytest.raises(StoreError, match="cannot be decoded"):
            both(folder)[0].read(0, 5)


def test_frames_whose_blocks_are_in_another_order(shard: tuple[Path, Path, Array]) -> None:
    """Blocks of a frame are read in any order: Blosc's threads write a block when it is ready."""
    folder, file, values = shard

    def turn(chunk: bytearray) -> None:
        starts = [*struct.unpack_from("<8i", chunk, 16), len(chunk)]
        blocks = [bytes(chunk[a:b]) for a, b in zip(starts[:-1], starts[1:], strict=True)]
        chunk[48:] = b"".join(reversed(blocks))
        place = 48
        for number in reversed(range(8)):
            struct.pack_into("<i", chunk, 16 + 4 * number, place)
            place += len(blocks[number])

    put_chunk(file, 1, turn)
    ours, plain = both(folder)
    for begin, end in ((1000, 2000), (1003, 1007), (1990, 2000), (900, 2100)):
        assert (ours.read(begin, end) == values[begin:end]).all()
        assert (plain.read(begin, end) == values[begin:end]).all()
