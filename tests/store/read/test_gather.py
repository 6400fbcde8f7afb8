"""Batches of any sequences of a store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from tests.making.stores import features_of, make_store


def test_a_store_gives_any_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    make_store(path, features_of("default", "embedding"))
    fs = open_store(path)
    wanted = fs.embeddings()
    numbers = [np.array([30, 2, 17]), np.array([5]), np.array([35, 0])]
    for batch, asked in zip(fs.gather(numbers), numbers, strict=True):
        vectors = batch.embedding
        assert np.array_equal(batch.index, asked) and vectors is not None
        assert np.array_equal(vectors, wanted[asked])
        assert batch.texts == [fs[int(i)].text for i in asked]
        states = [fs[int(i)].views[0].hidden["mean"] for i in asked]
        assert np.allclose(batch.hidden["mean"].states(), np.concatenate(states), atol=1e-5)
    for wrong, got in (
        ([3, 36], "3..36"),
        ([], r"float64\[0\]"),
        ([1.7, 2], r"float64\[2\]"),
        (np.arange(36) > 9, r"bool\[36\]"),
    ):
        with pytest.raises(StoreError, match=f"numbers in 0..35; got {got}"):
            next(fs.gather([wrong]))


@pytest.mark.parametrize("read", ["stream", "gather"])
def test_unknown_arguments_are_refused_at_once(made: Callable[..., Any], read: str) -> None:
    fs = open_store(made("zarr")[0])
    start = partial(fs.gather, [[1]]) if read == "gather" else fs.stream
    for wrong, printed in (
        ({"features": "hiden"}, "features must be among hidden, .*, got ..hiden"),
        ({"view": 2}, "no view 2; it has 0..1"),
        ({"view": -1}, "no view -1; it has 0..1"),
    ):
        with pytest.raises(StoreError, match=f"{fs.path}: {printed}"):
            start(**wrong)
    below: dict[str, Any] = {"batch_texts": 0, "batch_tokens": 0, "every": 0, "skip": -1}
    for name in below:
        with pytest.raises(StoreError, match="batch_texts, pool_blocks and every must be over 0"):
            fs.stream(**{name: below[name]})
