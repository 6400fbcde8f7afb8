"""Every installed reader of the reading benchmark returns the same values for a small store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from benchmarks.reading import rounds
from benchmarks.reading.rounds import Bench, measure, sums
from benchmarks.reading.store_readers import peers
from harness import synthetic
from teachonce.store import StoreError, open_store
from teachonce.store.tools.verify import verify


@pytest.mark.slow
def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are complete. Few readers are measured, as each runs in a separate process."""
    few = ("ours, Zarr", ".npy memory map, fused records", "litdata, fused bytes")

    def some(zarr: Path, h5: Path) -> list[Any]:
        return [peer for peer in peers(zarr, h5) if peer.name in few]

    monkeypatch.setattr(rounds, "peers", some)
    results = tmp_path / "RESULTS.md"
    measure(tmp_path / "work", tokens=3000, width=16, kept=4, rounds=1, results=results)
    printed = results.read_text("utf-8")
    assert printed.startswith("# Results") and "## Reading, d=16, top-4" in printed
    for name in few[:2]:
        warm, cold = (line for line in printed.splitlines() if line.startswith(f"| {name} |"))
        for row in (warm, cold):
            cells = [cell.strip(" %").replace(",", "") for cell in row.strip("|").split("|")]
            assert all(float(cell) > 0 for cell in cells[1:]), row
    assert f"| {few[2]} |" in printed and "times the speed of one process" in printed


def test_every_reader_delivers_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "PART_TOKENS", 1500)
    bench = Bench(tmp_path, 3000, 16, 4)
    names = {peer.name for peer, _ in bench.peers}
    assert {"ours, Zarr", "ours, HDF5", "zarr-python", "pyarrow, Table.take",
            "datasets, one column per feature", "datasets, fused bytes"} <= names  # fmt: skip
    assert len(names) + len(bench.missing) == 12
    assert all("not installed" in why for why in bench.missing.values())
    assert len(bench.corpus.store.manifest.parts) > 1


def test_a_reader_that_delivers_something_else_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1500, 16, 4)
    peer, path = next((p, path) for p, path in bench.peers if p.name.startswith(".npy"))
    epoch = peer.open(bench.corpus, path)
    assert sums(epoch(0)) == sums(epoch(1)) == bench.expected
    values = np.load(path / "maps.npy", mmap_mode="r+")
    values[7] ^= 1
    values.flush()
    with pytest.raises(StoreError, match=r"\.npy .* does not deliver what was written"):
        bench._check(peer, path)


def test_a_synthetic_store_is_like_a_real_one(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    synthetic.make_store(path, 9000, synthetic.features_of(16, 4))
    assert verify(path).problems == []
    store = open_store(path)
    lengths = np.concatenate([store.lengths(int(a), int(b)) for a, b in store.blocks()])
    assert 8000 < lengths.sum() <= 9000 and 17 < np.median(lengths) < 25
    record = store[3]
    words = [record.text[a:b] for a, b in record.offsets[1:-1]]
    assert " ".join(words) == record.text and record.special.sum() == 2
    logits = record.views[0].logits
    total = np.exp(logits.logprobs).sum(axis=1) + np.exp(logits.rest)
    assert np.allclose(total, 1, atol=1e-2) and (np.diff(logits.logprobs, axis=1) <= 0).all()
    assert np.allclose(record.views[0].attention["mean"].sum(axis=1), 1, atol=0.1)
    synthetic.make_store(tmp_path / "b.zarr", 9000, synthetic.features_of(16, 4))
    again = open_store(tmp_path / "b.zarr")
    assert again.manifest.parts == store.manifest.parts


def test_zarr_python_reads_where_it_is_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, opened, real = Bench(tmp_path, 1500, 16, 4), list[str](), zarr.open_array

    def noted(name: str, **options: Any) -> Any:
        opened.append(name)
        return real(name, **options)

    monkeypatch.setattr(zarr, "open_array", noted)
    for name, reads in (("ours, Zarr", False), ("zarr-python", True)):
        peer, path = next((p, path) for p, path in bench.peers if p.name == name)
        assert sums(peer.open(bench.corpus, path)(0)) == bench.expected
        assert any("parts/0/view0/hidden" in each for each in opened) == reads
