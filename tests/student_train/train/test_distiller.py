"""The student in training: what padding and unread tokens do to its losses, which is nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from store import FeatureStore
from student_train.data.batch import Inputs
from student_train.output.run import prepare
from student_train.settings.options import TrainOptions
from student_train.train.distiller import Distiller

LOSSES = ("mlm", "kl", "hidden", "cosine", "sentence")


def padded(inputs: Inputs, columns: int, token: int) -> Inputs:
    """The inputs with more columns, where `token` stands and none is present."""

    def wider(values: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, columns), value=value)

    return Inputs(wider(inputs.ids, token), wider(inputs.present, 0))


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:12,10"])
def test_padding_changes_no_loss(store: FeatureStore, student: str) -> None:
    options = TrainOptions(
        store=str(store.path),
        vocab="400",
        student=student,
        loss=dict.fromkeys(LOSSES, 1.0),
        device="cpu",
        precision="fp32",
    ).resolved()
    model, collator, _ = prepare(options, store)
    distiller = Distiller(model, options, store.features.hidden, store.features.width).eval()
    raw = next(iter(store.stream(0, 0, 512, features=collator.features())))
    batch = collator(raw, 0, (0,)).to(torch.device("cpu"))
    with torch.no_grad():
        found = distiller(batch)
        assert set(found) == set(LOSSES)
        for token in (collator.padding, 7):
            more = distiller(replace(batch, inputs=padded(batch.inputs, 3, token)))
            for name, value in found.items():
                assert more[name].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
