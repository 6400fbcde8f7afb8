"""Batches of similar texts hold every text once, and near ones together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachonce.store import StoreError, open_store
from teachonce.student_train.data.similar import TOGETHER, similar_batches
from tests.store.making import features_of, make_store


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 5))
def test_every_text_comes_once(count: int, size: int, epoch: int) -> None:
    chance = np.random.default_rng(count)
    vectors = chance.normal(size=(400, 4)).astype(np.float32)
    members = np.sort(chance.choice(400, count, replace=False))
    batches = similar_batches(vectors, members, size, 7, epoch)
    assert np.array_equal(np.sort(np.concatenate(batches)), members)
    assert {len(batch) for batch in batches[:-1]} <= {size} and 1 <= len(batches[-1]) <= size
    again = similar_batches(vectors, members, size, 7, epoch)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_near_texts_meet_and_others_in_the_next_epoch() -> None:
    chance = np.random.default_rng(0)
    topics = np.eye(32, dtype=np.float32)
    vectors = np.repeat(topics, 64, axis=0) + chance.normal(size=(2048, 32), scale=0.05)
    shuffled = np.arange(2048)
    batches = similar_batches(vectors.astype(np.float32), shuffled, 128, 1, 0)
    assert all(len(batch) == 128 for batch in batches)
    # Of 32 topics a batch of 128 has some 31 by chance, and fewer of groups of 16.
    assert TOGETHER == 16 and np.mean([len(np.unique(b // 64)) for b in batches]) < 26
    other = similar_batches(vectors.astype(np.float32), shuffled, 128, 1, 1)
    assert not np.array_equal(batches[0], other[0])


def test_a_store_gives_any_sequences(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "a.zarr"
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
    with pytest.raises(StoreError, match="sequences must lie in 0..35"):
        next(fs.gather([[36]]))
