"""The nearest sequences of a store: by stored vectors, else by the means of hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from teachonce.feature_store.page import nearest as module
from teachonce.feature_store.page.nearest import COUNT, nearest
from teachonce.store import open_store
from tests.making.stores import features_of, make_store


@pytest.mark.parametrize("kind", ("states", "embedding"))
def test_they_are_those_of_all_pairs(tmp_path: Path, store: Path, kind: str) -> None:
    path = store
    if kind == "embedding":
        path = tmp_path / "a.zarr"
        make_store(path, features_of(tier="embedding"), parts=2)
    fs = open_store(path)
    mean, deviation = fs.calibration["mean"]
    vectors = np.stack(
        [
            record.embedding
            if kind == "embedding"
            else ((record.views[0].hidden["mean"] - mean) / deviation)[~record.special].mean(axis=0)
            for record in fs
        ]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = nearest(fs, [17, 3])
    assert found.among is not None and found.among.whole and kind[:5] in found.about
    for number in (17, 3):
        cosines = vectors @ vectors[number]
        order = [each for each in np.argsort(-cosines) if each != number][:COUNT]
        assert [other for other, _ in found.neighbours[number]] == order
        assert [c for _, c in found.neighbours[number]] == pytest.approx(cosines[order], abs=1e-4)


def test_a_large_store_is_sampled(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATES", 1)
    found = nearest(open_store(store), [17])
    assert found.among is not None and found.among.summary == "12 of 24 sequences, spread evenly"
    assert {other for other, _ in found.neighbours[17]} <= set(range(12))


def test_a_store_may_have_no_vectors(tmp_path: Path) -> None:
    make_store(tmp_path / "a.zarr", replace(features_of(), hidden=(), attention=()), parts=1)
    found = nearest(open_store(tmp_path / "a.zarr"), [0])
    assert found.neighbours == {} and "neither vectors of texts nor hidden states" in found.about
