"""Batches of any sequences of a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teachonce.store import StoreError, open_store
from tests.store.making import features_of, make_store


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
    with pytest.raises(StoreError, match=r"numbers in 0..35; got 3..36"):
        next(fs.gather([[3, 36]]))
    with pytest.raises(StoreError, match=r"numbers in 0..35; got an array of shape \(0,\)"):
        next(fs.gather([[]]))
