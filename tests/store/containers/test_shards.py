"""Our reader and writer of Zarr shards agree with zarr-python, and refuse damaged shards.

- Our reader of Zarr shards returns the same values as zarr-python.
- A damaged or forged shard is refused with one line; its sound chunks are still read.
- Arrays are written byte for byte as zarr-python writes them.
"""

import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec

from teachonce.store import FeatureStore, StoreError, open_store
from teachonce.store.containers.interface import damaged_chunks
from teachonce.store.containers.memory_map import OPEN_FILES, OpenFiles
from teachonce.store.containers.zarr.shards import (
    DTYPES,
    MappedShard,
    ShardLayout,
    ShardSlices,
    shard_layout,
)
from teachonce.store.containers.zarr.tree import TOKEN_ROWS, ZarrSink, ZarrSource
from teachonce.store.containers.zarr.zarr_python import ZarrSlices
from teachonce.store.format.codecs.codec import DENSE, FAST, LEAN, Packing
from teachonce.store.format.layout import ArraySpec, dimension_names
from teachonce.support.arrays import Array
from tests.making.stores import Made
from tests.store.containers.shard_files import (
    Shuffle,
    blosc,
    both,
    by_zarr_python,
    index_of,
    put_chunk,
    put_index,
    random_values,
    write,
)
from tests.store.read.test_stream import printed
from tests.store.rewriting import write_shard
from tests.store.test_foreign import arrays_of

VALUE_TYPES = ("bool", "int8", "uint8", "uint16", "int32", "uint32", "int64", "float16", "float32")


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_rows_match_zarr_python(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    draw = data.draw
    dtype, row = (
        draw(st.sampled_from(VALUE_TYPES)),
        draw(st.sampled_from([(), (1,), (6,), (16, 2)])),
    )
    length, rows = draw(st.integers(0, 700)), draw(st.integers(1, 300))
    packing: list[Any] = []
    if draw(st.booleans()):
        shuffle: Shuffle = draw(st.sampled_from(["bitshuffle", "shuffle", "noshuffle"]))
        size, blocksize = np.dtype(dtype).itemsize, draw(st.sampled_from([0, 1024, 5000]))
        packing = [blosc(draw(st.sampled_from(["lz4", "zstd"])), shuffle, size, blocksize)]
    values = random_values(
        dtype, (length, *row), draw(st.integers(0, 99)), draw(st.sampled_from([2, 9, 256]))
    )
    folder = write(tmp_path_factory.getbasetemp() / "any.zarr", values, rows, packing)
    ours, plain = both(folder)
    assert isinstance(ours, ShardSlices) and isinstance(plain, ZarrSlices)
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype) == (values.shape, values.dtype)
    for _ in range(6):
        begin, end = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        for found in (ours.read(begin, end), plain.read(begin, end)):
            assert found.dtype == values.dtype and found.tobytes() == values[begin:end].tobytes()
        around = np.zeros((length + 2, *row), values.dtype)
        ours.prefetch(begin, end)
        ours.read_into(begin, end, around[1 : end - begin + 1])
        assert around[1 : end - begin + 1].tobytes() == values[begin:end].tobytes()
        assert not around[0].any() and not around[end - begin + 1 :].any()
    assert ours.read(0, length + 9).tobytes() == values.tobytes()
    assert len(ours.read(length, 0)) == 0


def test_read_into_takes_only_what_fits(tmp_path: Path) -> None:
    ours, _ = both(write(tmp_path / "a.zarr", np.zeros((10, 4), "f4"), 4, []))
    for begin, end, out in (
        (0, 5, np.zeros((4, 4), "f4")),
        (0, 5, np.zeros((5, 4), "f8")),
        (0, 5, np.zeros((4, 5), "f4").T),
        (8, 12, np.zeros((4, 4), "f4")),
        (-1, 3, np.zeros((4, 4), "f4")),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            ours.read_into(begin, end, out)


def create(folder: Path, shards: Any, codec: Any = None, **other: Any) -> None:
    group = zarr.create_group(folder)
    settings: dict[str, Any] = {"filters": None, "compressors": [Crc32cCodec()]} | other
    if codec is not None:
        settings = {"filters": None, "compressors": None, "serializer": codec}
    array = group.create_array(
        "a",
        shape=(50,),
        dtype="u4",
        chunks=(10,) if codec is None else (60,),
        shards=shards,
        **settings,
    )
    array[...] = np.arange(50)


SHARD: dict[str, Any] = {"chunk_shape": (10,), "codecs": [BytesCodec(), Crc32cCodec()]}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: create(folder, (20,)),  # several shards
        lambda folder: create(folder, None),  # none
        lambda folder: create(folder, (50,), compressors=None),
        lambda folder: create(folder, (50,), serializer=BytesCodec(endian="big")),
        lambda folder: create(folder, None, ShardingCodec(**SHARD, index_location="start")),
        lambda folder: create(folder, None, ShardingCodec(**SHARD, index_codecs=[BytesCodec()])),
    ],
)
def test_what_we_do_not_know_is_read_by_zarr_python(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "a.zarr")
    array = ZarrSource(str(tmp_path / "a.zarr")).array("a")
    assert isinstance(array, ZarrSlices)
    assert (array.read(7, 33) == np.arange(7, 33)).all()
    out = np.zeros(26, "u4")
    array.read_into(7, 33, out)
    assert (out == np.arange(7, 33)).all()


def test_metadata_that_we_do_not_know(tmp_path: Path) -> None:
    folder = write(tmp_path / "a.zarr", np.zeros((10, 2), "u4"), 5, [])
    text = (folder / "a/zarr.json").read_text()
    assert shard_layout(json.loads(text)) == ShardLayout((10, 2), np.dtype("u4"), 5, 2, False)

    def changed(*path: Any, value: Any) -> dict[str, Any]:
        node = json.loads(text)
        inner = node
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return dict(node)

    sharding = ("codecs", 0, "configuration")
    for node in (
        changed("zarr_format", value=2),
        changed("node_type", value="group"),
        changed("shape", value=[10]),
        changed("shape", value=[-10, 2]),
        changed("shape", value=[11, 2]),
        changed("shape", value=[10.0, 2]),
        changed("shape", value=7),
        changed("data_type", value={"name": "uint32"}),
        changed("data_type", value="complex64"),
        changed("codecs", value=[]),
        changed("chunk_grid", "name", value="rectilinear"),
        changed("chunk_grid", "configuration", "chunk_shape", value=[12, 2]),
        changed("chunk_key_encoding", "configuration", "separator", value="."),
        changed("storage_transformers", value=[{"name": "new"}]),
        changed(*sharding, "chunk_shape", value=[0, 2]),
        changed(*sharding, "chunk_shape", value=[5, 1]),
        changed(*sharding, "codecs", 0, "configuration", "endian", value="big"),
        changed(*sharding, "index_codecs", 0, "configuration", "endian", value="big"),
        changed(*sharding, "codecs", value=["bytes", "crc32c"]),
        {},
    ):
        assert shard_layout(node) is None, node


def test_maps_are_few_and_keep_no_file_open(tmp_path: Path, made: Made) -> None:
    assert OpenFiles()._limit == OPEN_FILES == 512
    folder = write(tmp_path / "a.zarr", np.arange(20, dtype="i8"), 5, [])
    source, maps = ZarrSource(str(folder)), OpenFiles[MappedShard](3)
    layout = source.array("a").layout  # type: ignore[attr-defined]
    files = []
    for number in range(7):
        files.append(tmp_path / f"{number}")
        shutil.copy(folder / "a/c/0", files[-1])
    mapped = partial(MappedShard, layout=layout)
    arrays = [ShardSlices(layout, "x", partial(maps.get, str(file), mapped)) for file in files]
    opened = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(2):
        for array in arrays:
            assert (array.read(3, 17) == np.arange(3, 17)).all()
            assert len(maps) <= 3
    if opened:
        assert len(os.listdir("/proc/self/fd")) == opened
    fs = open_store(made("zarr")[0])
    text = fs[3].text
    assert len(fs.source.maps)  # type: ignore[attr-defined]
    fs.close()
    assert not len(fs.source.maps) and fs[3].text == text  # type: ignore[attr-defined]


@pytest.mark.parametrize(("codec", "tier"), [("default", "sample"), ("small", "topk")])
def test_an_epoch_is_the_same_with_and_without_our_reader(
    made: Made, codec: str, tier: str
) -> None:
    path = made("zarr", codec, tier)[0]
    ours, plain, h5 = open_store(path), open_store(path), open_store(made("h5", codec, tier)[0])

    def epoch(fs: FeatureStore, view: int) -> list[dict[str, Any]]:
        batches = fs.stream(5, 1, 300, view=view, blocks=fs.blocks(90), pool_blocks=5)
        return [printed(batch) for batch in batches]

    for view in (0, 1):
        found = epoch(ours, view)
        assert len(found) > 1
        with by_zarr_python():
            for other in (plain, h5):
                np.testing.assert_equal(epoch(other, view), found)
            assert isinstance(plain.part(0).array("token/id"), ZarrSlices)
    assert isinstance(ours.part(0).array("token/id"), ShardSlices)


def test_every_array_of_a_store_is_read_by_us(made: Made) -> None:
    """Every array of a store is read by our reader; the tests above would pass without it."""
    path = made("zarr", "default", "sample")[0]
    source, names = ZarrSource(str(path)), arrays_of(path)
    assert len(names) > 80
    assert all(isinstance(source.array(name), ShardSlices) for name in names)


class _SlowText(str):
    """A path whose comparison lets other threads run, as Python code may at any time."""

    def __eq__(self, other: object) -> bool:
        time.sleep(0)
        return bool(super().__eq__(other))

    def __hash__(self) -> int:
        time.sleep(0)
        return int(super().__hash__())


def test_threads_share_open_files(tmp_path: Path) -> None:
    """Threads share open files: each operation on them is atomic (an OrderedDict crashed here)."""
    files = OpenFiles[str](3)

    def opened(seed: int) -> None:
        for number in range(3000):
            name = f"{(number * seed) % 7}"
            assert files.get(_SlowText(tmp_path / name), lambda path: Path(path).name) == name

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(opened, range(1, 5)))
    assert len(files) <= 3


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


def write_by_zarr_python(folder: Path, name: str, spec: ArraySpec, rows: int, values: Any) -> None:
    packing = spec.packing and BloscCodec(**spec.packing._asdict(), typesize=spec.dtype.itemsize)
    chunks = rows, *(max(1, size) for size in spec.shape[1:])
    names = dimension_names(name, len(spec.shape))
    write_shard(folder, name, values, chunks, [packing] if packing else [], dimension_names=names)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent != folder
    }


@pytest.mark.slow
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    packing=st.sampled_from([None, FAST, DENSE, LEAN, Packing("zstd", 1, "noshuffle")]),
    per_token=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_array(
    dtype: str, shape: tuple[int, ...], packing: Packing | None, per_token: bool, seed: int
) -> None:
    spec = ArraySpec(np.dtype(dtype), shape, packing, per_token)
    values = np.random.default_rng(seed).integers(0, 5, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("teachonce.store.containers.zarr.tree.TOKEN_ROWS", 16)
        patch.setattr("teachonce.store.containers.zarr.tree.CHUNK_BYTES", 256)
        ours, theirs = Path(name) / "ours", Path(name) / "theirs"
        ZarrSink(ours).array("array", values, spec)
        write_by_zarr_python(theirs, "array", spec, spec.rows(16, 256), values)
        assert files(ours) == files(theirs)


def test_blocks_of_one_chunk_are_in_order(tmp_path: Path) -> None:
    """The Blosc blocks of a large chunk are in order, independent of Blosc's threads."""
    values = np.random.default_rng(0).random((2 * TOKEN_ROWS + 1, 64)).astype(np.float32)
    spec = ArraySpec(values.dtype, values.shape, FAST, per_token=True)
    ZarrSink(tmp_path / "ours").array("array", values, spec)
    write_by_zarr_python(tmp_path / "theirs", "array", spec, TOKEN_ROWS, values)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
