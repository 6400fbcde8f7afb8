"""Captures written by the tools' own code are read as that code reads them.

`golden/distillkit.json`: settings, columns, and what `LogprobCompressor` makes of them, by
github.com/arcee-ai/DistillKit at a61c2e7. `golden/cp0_dp0__1.tar`: two iterations of two
microbatches [12,2,70000] by `LogitsSaverHooks(k=6, p=0.9)` of github.com/NVIDIA/Megatron-LM at
d98e8a6, and in `megatron.json` the six best of each token before they were cut and rounded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from teachonce.feature_store.captures.compressed_logprobs import index_bits, packed_ids
from teachonce.feature_store.captures.distillkit import DistillKit
from teachonce.feature_store.captures.formats import ImportOptions
from teachonce.feature_store.captures.megatron import Megatron
from teachonce.feature_store.captures.teacher_files import TeacherFiles
from tests.making.models import Tokenizers

GOLDEN = Path(__file__).parent / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "distillkit.json").read_text())


@pytest.fixture(scope="module")
def large(make_tokenizer: Tokenizers) -> TeacherFiles:
    """Save a teacher of 70,000 pieces, whose tokenizer has the first of them."""
    return TeacherFiles("large", make_tokenizer("bpe-plain"), {}, 70_000)


@pytest.mark.parametrize("case", CASES, ids=[str(n) for n in range(len(CASES))])
def test_distillkit(case: dict[str, Any], large: TeacherFiles, tmp_path: Path) -> None:
    columns = {"input_ids": [1, 2, 3]} | case["columns"]
    table = pa.table({name: pa.array([values]) for name, values in columns.items()})
    parquet.write_table(table, tmp_path / "data_0.parquet")
    if case["settings"]:
        (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(case["settings"]))
    capture = DistillKit(ImportOptions(tmp_path, tmp_path / "a.zarr"), large)
    (sample,) = capture.samples()
    kept = sample.rows().topk
    assert kept is not None and capture.contents.topk == kept[0].shape[1]
    assert kept[0].tolist() == case["ids"]
    assert np.abs(kept[1] - np.array(case["logprobs"])).max() < 1e-4
    if packed := case["columns"].get("bytepacked_indices"):
        bits = index_bits(case["settings"]["d"])
        assert packed_ids(np.array(case["ids"]), bits).tolist() == packed


def test_megatron(large: TeacherFiles, tmp_path: Path) -> None:
    """Ids have 17 bits; the entries within the nucleus are the best pieces, the others empty."""
    shutil.copy(GOLDEN / "cp0_dp0__1.tar", tmp_path)
    np.save(tmp_path / "tokens.npy", np.ones((8, 12), np.int32))
    options = ImportOptions(tmp_path, tmp_path / "a.zarr", tokens=tmp_path / "tokens.npy")
    capture = Megatron(options, large)
    best = json.loads((GOLDEN / "megatron.json").read_text())
    true = [(np.array(best["ids"][m][b]), np.array(best["logprobs"][m][b]))
            for m in range(4) for b in range(2)]  # fmt: skip
    found = [sample.rows().topk for sample in capture.samples()]
    assert len(found) == len(true) and capture.contents.topk == 6
    empty = 0
    for kept, (ids, logprobs) in zip(found, true, strict=True):
        assert kept is not None
        there = np.isfinite(kept[1])
        width = there.shape[1]
        mass = np.exp(logprobs[:, :width]).cumsum(1) - np.exp(logprobs[:, :width])
        assert (there == (mass < 0.9)).all()
        assert (kept[0] == ids[:, :width])[there].all()
        assert np.abs(kept[1] - logprobs[:, :width])[there].max() < 0.01  # float16
        empty += int((~there).sum())
    assert empty and max(ids.max() for ids, _ in true) > 65_535
