"""A share of a stream has exactly every N-th batch, and reads little else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import synthetic
from teachonce.store import Batch, StoreError, open_store
from teachonce.store.containers.zarr.shards import ShardSlices
from teachonce.support.arrays import Array
from tests.integrity.laundering import alter
from tests.making.stores import Part

Made = Callable[..., tuple[Path, list[Part]]]
BATCH = 60
LENGTH, WIDTH = 200, 1024  # the states of a sequence are larger than a gap that is read through


def printed(batch: Batch) -> dict[str, Any]:
    """Return copies of all values of a batch."""
    logits = batch.logits
    return {
        **{name: values.copy() for name, values in batch.stored.items()},
        **{name: batch.attention[name].copy() for name in batch.attention},
        **{name: np.array(value) for name, value in vars(logits).items()},
        "index": batch.index,
        "document": batch.document,
        "spans": batch.spans,
        "spans_start": batch.spans_start,
        "texts": batch.texts,
    }  # fmt: skip


@pytest.mark.parametrize("grain", [1, 300])
@pytest.mark.parametrize(("ext", "tier"), [("zarr", "topk"), ("zarr", "sample"), ("h5", "topk")])
def test_the_shares_are_the_batches_of_the_whole(
    made: Made, ext: str, tier: str, grain: int
) -> None:
    with open_store(made(ext, tier=tier)[0]) as fs:
        order: dict[str, Any] = {"blocks": fs.blocks(30), "pool_blocks": 4, "view": 1}
        whole = [printed(batch) for batch in fs.stream(3, 1, BATCH, **order)]
        assert len(whole) > 8
        fs._index.grain = grain
        for first in range(3):
            wanted = whole[4 + first :: 3]
            some = fs.stream(3, 1, BATCH, **order, skip=4 + first, every=3)
            for want, batch in zip(wanted, map(printed, some), strict=True):
                assert want.keys() == batch.keys()
                for name, values in want.items():
                    np.testing.assert_array_equal(batch[name], values, err_msg=name)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "store.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "MEDIAN", LENGTH)
        patch.setattr(synthetic, "SPREAD", 0.1)
        synthetic.make_store(path, 8_000, synthetic.features_of(WIDTH, 4))
    return path


@pytest.mark.parametrize("every", [1, 2, 4])
def test_bytes_that_a_share_reads(wide: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    read, plain = [0], ShardSlices.read_into

    def counted(self: ShardSlices, begin: int, end: int, out: Array) -> None:
        read[0] += out.nbytes
        plain(self, begin, end, out)

    monkeypatch.setattr(ShardSlices, "read_into", counted)
    with open_store(wide) as fs:
        of_shares = []
        for first in range(every):
            read[0] = 0
            batches = fs.stream(batch_tokens=1024, skip=first, every=every)
            held = sum(array.nbytes for batch in batches for array in batch.stored.values())
            assert 0.99 * held <= read[0] < 1.35 * held
            of_shares.append(held)
        assert sum(of_shares) > (WIDTH + LENGTH) * fs.meta["tokens"]


def test_each_share_checks_parts_of_its_own(copy: Callable[..., Path]) -> None:
    path = copy("zarr")
    alter(path, "parts/1/token/id")

    def finds(first: int) -> bool:
        with open_store(path) as fs:
            try:
                for _ in fs.stream(batch_tokens=BATCH, skip=first, every=3, check=True):
                    pass
            except StoreError as error:
                assert "part 1: token/id does not match its checksum" in str(error)
                return True
            return False

    assert [finds(first) for first in range(3)] == [False, True, False]
