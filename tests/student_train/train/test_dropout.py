"""Dropout is active in training only, the same after a stop, and recorded with the student."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from teachonce.store import FeatureStore
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.student_training import train
from tests.student_train import support
from tests.student_train.stopping import resume, stop

LOSS = {"mlm": 1.0, "hidden": 1.0}
options_for = partial(support.options_for, loss=LOSS, steps=4, lr=1e-2, checkpoint_every=1)
MASKS = "masks     a masked view an epoch, 1: new masks each epoch"
DROPPED = {
    "bert:16x2x2": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "16x2x2": ("embedding_dropout", "mlp_dropout", "attention_dropout", "classifier_dropout"),
    "bilstm:8,8": ("dropout", "recurrent_dropout"),
}


def weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("student", DROPPED)
def test_a_stopped_training_drops_the_same(
    store: FeatureStore, tmp_path: Path, student: str
) -> None:
    options = options_for(store, student=student, dropout=0.3)
    straight, collator, _ = prepare(options, store)
    expected = train(store, straight, collator, options).validation
    stop(store, options, tmp_path, 2)
    again, resumed, said = resume(store, options, tmp_path)
    assert said == ["resume    after step 2", MASKS] and resumed.validation == expected
    assert torch.equal(weights(again), weights(straight))
    plainly = replace(options, dropout=0.0, device="auto")  # as options that are made in Python
    plain, _, _ = prepare(plainly, store)
    train(store, plain, collator, plainly)
    assert not torch.equal(weights(plain), weights(straight))


def test_states_that_a_bilstm_is_taught_are_dropped_too(store: FeatureStore) -> None:
    """Mukherjee & Awadallah 2019, section 6, use dropout after every layer."""
    options = options_for(store, student="bilstm:8,8", dropout=0.5)
    model, collator, _ = prepare(options, store)
    distiller = Distiller.of(model, options, store)
    read = list[torch.Tensor]()
    for linear in distiller.projections.values():
        linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    batch = support.first_batch(store, collator)
    for training, share in ((True, 0.5), (False, 0.0)):
        distiller.train(training)
        distiller(batch)
        assert float((read.pop() == 0).float().mean()) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("student", DROPPED)
def test_it_is_recorded_and_validation_drops_nothing(
    store: FeatureStore, student: str, tmp_path: Path
) -> None:
    options = options_for(store, student=student, dropout=0.3)
    model, collator, _ = prepare(options, store)
    plain, _, _ = prepare(replace(options, dropout=0.0), store)
    assert torch.equal(weights(model), weights(plain))
    model.save_pretrained(tmp_path)
    saved = type(model.config).from_pretrained(tmp_path)
    for name in DROPPED[student]:
        assert getattr(saved, name) == 0.3 and getattr(plain.config, name) == 0.0, name
    found = []
    for each in (model, plain):
        torch.manual_seed(0)
        distiller = Distiller.of(each, options, store).train()
        found.append(support.validated(distiller, store, collator, options))
        assert distiller.training
    assert found[0] == found[1] and found[0]["valid_loss"] > 0
