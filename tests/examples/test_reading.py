"""The examples that open a store without this software."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import open_store
from tests.examples.loading import EXAMPLES, example
from tests.making.stores import features_of, make_store


@pytest.mark.parametrize("codec", ["default", "exact"])
def test_zarr_xarray_and_h5py_find_the_same(tmp_path: Path, codec: str) -> None:
    elsewhere, paths = example("open_elsewhere"), [tmp_path / "a.zarr", tmp_path / "a.h5"]
    for path in paths:
        make_store(path, features_of(codec, "ranked-topk"), parts=1)
    in_zarr, in_h5 = map(str, paths)
    readers: list[tuple[Callable[[str], Any], str]] = [
        (elsewhere.with_zarr, in_zarr), (elsewhere.with_xarray, in_zarr),
        (elsewhere.with_h5py, in_h5),
    ]  # fmt: skip
    record = open_store(in_zarr)[0]
    logits = record.views[0].logits
    for reader, where in readers:
        text, tokens, best, logs = reader(where)
        assert text == record.text and tokens == record.token_ids.tolist()
        assert best == logits.ids[1].tolist()
        np.testing.assert_array_equal(np.float32(logs), logits.logprobs[1])


def test_it_needs_nothing_of_ours(tmp_path: Path) -> None:
    make_store(tmp_path / "a.zarr", features_of(tier="ranked-topk"), parts=1)
    code = (
        f"import runpy, sys; sys.argv = ['x', {str(tmp_path / 'a.zarr')!r}]\n"
        f"runpy.run_path({str(EXAMPLES / 'open_elsewhere.py')!r}, run_name='__main__')\n"
        "assert not {'teachonce', 'torch'} & {name.split('.')[0] for name in sys.modules}"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["with_zarr", "with_xarray"]
