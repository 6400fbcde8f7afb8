"""Arrays are written byte for byte as zarr-python writes them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec

from teachonce.store.containers.zarr.shards import DTYPES
from teachonce.store.containers.zarr.tree import TOKEN_ROWS, ZarrSink
from teachonce.store.format.codecs.codec import DENSE, FAST, LEAN, Packing
from teachonce.store.format.layout import ArraySpec, dimension_names
from tests.store.rewriting import write_shard


def by_zarr_python(folder: Path, name: str, spec: ArraySpec, rows: int, values: Any) -> None:
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
        by_zarr_python(theirs, "array", spec, spec.rows(16, 256), values)
        assert files(ours) == files(theirs)


def test_blocks_of_one_chunk_are_in_order(tmp_path: Path) -> None:
    """The Blosc blocks of a large chunk are in order, independent of Blosc's threads."""
    values = np.random.default_rng(0).random((2 * TOKEN_ROWS + 1, 64)).astype(np.float32)
    spec = ArraySpec(values.dtype, values.shape, FAST, per_token=True)
    ZarrSink(tmp_path / "ours").array("array", values, spec)
    by_zarr_python(tmp_path / "theirs", "array", spec, TOKEN_ROWS, values)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
