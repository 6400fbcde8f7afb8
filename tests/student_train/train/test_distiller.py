"""The student in training: padding and unread tokens change no loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.plan.checks import checked_plan
from teachonce.student_train.train.distiller import Distiller
from teachonce.support.errors import UserError
from tests.making.models import Stores
from tests.student_train.support import distilling, first_batch, options_for

LOSSES = ("mlm", "kl", "hidden", "cosine", "sentence")


def padded(inputs: Inputs, columns: int, token: int) -> Inputs:
    """Append columns of `token` that the mask excludes to the inputs."""

    def wider(values: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, columns), value=value)

    return Inputs(wider(inputs.ids, token), wider(inputs.present, 0))


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:12,10"])
def test_padding_changes_no_loss(store: FeatureStore, student: str) -> None:
    losses = dict.fromkeys(LOSSES, 1.0)
    distiller, collator, _ = distilling(store, student=student, loss=losses)
    batch = first_batch(store, collator)
    with torch.no_grad():
        found = distiller(batch)
        assert set(found) == set(LOSSES)
        for token in (collator.padding, 7):
            more = distiller(replace(batch, inputs=padded(batch.inputs, 3, token)))
            for name, value in found.items():
                assert more[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name


def compared(store: FeatureStore, **changes: Any) -> tuple[Distiller, Any]:
    """Make a student with random projections, and a batch for it."""
    distiller, collator, options = distilling(store, align="match", **changes)
    checked_plan(options, store)
    return distiller, first_batch(store, collator)


@torch.no_grad()
def test_raw_states_are_compared_as_the_teacher_gave_them(store: FeatureStore) -> None:
    losses = {"hidden-raw": 1.0, "hidden-raw-sum": 1.0, "hidden": 1.0}
    distiller, batch = compared(store, loss=losses)
    wanted, found = batch.distillation, distiller(batch)
    mean, deviation = store.calibration["mean"]
    raw = wanted.normalised["mean"].numpy() * deviation + mean
    states = torch.stack(distiller.encode(batch.inputs).states[1:]).mean(0)
    own = wanted.runs.pool(states, "mean")
    for name, over in (("hidden-raw", raw.size), ("hidden-raw-sum", len(raw))):
        key = f"{name}_mean"
        gap = distiller.projections[key](own).numpy().astype(np.float64) - raw
        assert found[name].item() == pytest.approx((gap**2).sum() / over, rel=1e-4)
    assert found["hidden-raw"].item() != pytest.approx(found["hidden"].item(), rel=0.01)


def test_projections_start_as_asked(store: FeatureStore) -> None:
    """Kolesnikova et al. 2022, appendix B.2, 3: He, frozen and trained."""
    deviations = {}
    for projection in ("trainable", "frozen"):
        for start in ("he", "pytorch"):
            torch.manual_seed(0)
            distiller, _ = compared(
                store, loss={"hidden": 1.0}, projection=projection, projection_start=start
            )
            (linear,) = distiller.projections.values()
            (weight, _) = linear.parameters()
            deviations[projection, start] = float(weight.std())
            assert weight.requires_grad == (projection == "trainable")
    he, uniform = (2 / 16) ** 0.5, (1 / (3 * 16)) ** 0.5  # of 16 inputs
    for (_, start), found in deviations.items():
        assert found == pytest.approx(he if start == "he" else uniform, rel=0.1)


@pytest.fixture(scope="module")
def counted(tiny_store: Stores) -> FeatureStore:
    """Stores the mean of the layers, and the mean of layers and embeddings."""
    return open_store(tiny_store("bert", 20, hidden="mean:0,mean", attention="none"))


@torch.no_grad()
def test_a_mean_that_counts_the_embeddings_has_its_like(counted: FeatureStore) -> None:
    assert list(counted.features.hidden) == ["mean0", "mean"]
    distiller, batch = compared(counted, loss={"hidden-raw-sum": 1.0})
    read, wanted = distiller.encode(batch.inputs), batch.distillation
    assert len(read.states) == 3  # embeddings and two layers
    expected = 0.0
    for name, states in (("mean0", read.states), ("mean", read.states[1:])):
        own = wanted.runs.pool(torch.stack(states).mean(0), "mean")
        gap = distiller.projections[f"hidden-raw-sum_{name}"](own) - wanted.decoded["raw"][name]
        expected += (gap.double() ** 2).sum().item() / len(gap) / 2
    assert distiller(batch)["hidden-raw-sum"].item() == pytest.approx(expected, rel=1e-4)


def test_embeddings_of_another_width_have_no_such_mean(
    counted: FeatureStore, tmp_path: Path
) -> None:
    options = options_for(counted, student="bilstm:12,10", loss={"hidden": 1.0}, out=tmp_path / "a")
    printed = "--student bilstm:12,10: .* include the embeddings .* 12 is not its hidden size 20;"
    with pytest.raises(UserError, match=printed):
        checked_plan(options, counted)
