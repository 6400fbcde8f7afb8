"""Pooling of runs and of the maps between them equals hand computation; padding changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.student_train.data.batch import MapPooling, Runs


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_pooling_runs(how: str) -> None:
    values = torch.arange(12.0).reshape(6, 2)
    runs = Runs.of(np.array([[0, 1], [1, 4], [5, 6]]))
    divisor = 3 if how == "mean" else 1
    want = torch.stack([values[0], values[1:4].sum(0) / divisor, values[5]])
    torch.testing.assert_close(runs.pool(values, how), want)
    constant = Runs.of(np.array([[0, 2], [2, 6]])).pool(torch.ones(6, 3), "mean")
    torch.testing.assert_close(constant, torch.ones(2, 3))


def test_pooling_maps_adds_up_what_is_attended_and_averages_who_asks() -> None:
    maps = torch.tensor(
        [[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], [[0.6, 0.4, 0], [1, 0, 0], [0, 0, 0]]]
    )
    pooling = MapPooling.of(np.array([[0, 2], [2, 3], [3, 4]]), np.array([0, 3, 5]))
    pooled = pooling.pool(maps)
    torch.testing.assert_close(pooled[0], torch.tensor([[0.85, 0.15], [0.6, 0.4]]))
    assert pooling.present.tolist() == [[True, True], [True, False]]
    assert pooled[1, 0, 0] == pytest.approx(0.6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), padding=st.integers(0, 4))
def test_padding_of_maps_changes_no_pooled_map(seed: int, padding: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, 3)
    start = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.flatnonzero(rng.random(start[-1]) < 0.7)
    if not len(firsts):
        return
    runs = np.stack([firsts, firsts + 1], axis=1)
    pooling, longest = MapPooling.of(runs, start), int(lengths.max())
    maps = torch.from_numpy(rng.random((3, longest, longest))).float()
    inside = torch.arange(longest) < torch.from_numpy(lengths)[:, None]
    square = inside[:, :, None] & inside[:, None, :]
    noisy = torch.where(square, maps, torch.full_like(maps, float(padding)))
    here = pooling.present
    pairs = here[:, :, None] & here[:, None, :]
    assert torch.equal(pooling.pool(noisy)[pairs], pooling.pool(maps)[pairs])
    assert int(here.sum()) == len(runs)
