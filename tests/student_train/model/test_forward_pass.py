"""A batch that is read in parts has the outputs, gradients and training of the whole batch, and
needs less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import Inputs
from teachonce.student_train.model import any_student as room
from teachonce.student_train.model.any_student import bytes_of_text, forward_pass
from teachonce.student_train.train.student_training import train
from tests.examples.loading import example
from tests.student_train.support import first_batch, prepared

STUDENTS = ("16x2x2", "modernbert:16x2x2", "bilstm:12,10", "static:16")
LOSS = {"mlm": 1.0, "hidden": 1.0}


def student_and_inputs(store: FeatureStore, student: str, **changes: Any) -> tuple[Any, Inputs]:
    model, collator, _ = prepared(store, student=student, loss=LOSS, **changes)
    return model, first_batch(store, collator).inputs


def hold(monkeypatch: pytest.MonkeyPatch, student: Any, inputs: Inputs, texts: int) -> None:
    """Limit each part of the inputs to `texts` texts."""
    monkeypatch.setattr(room, "CPU_BUDGET", texts * bytes_of_text(student, inputs.ids.shape[1]))


def outputs_and_gradients(student: Any, inputs: Inputs, maps: bool) -> list[Tensor]:
    student.zero_grad()
    read = forward_pass(student, inputs, maps)
    found = [*read.states, *read.maps]
    torch.stack([each.sin().square().sum() for each in found]).sum().backward()
    gradients = [weight.grad for weight in student.parameters() if weight.grad is not None]
    assert gradients and read.present is inputs.present
    return [*found, *gradients]


@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("student", [*STUDENTS, "of my own"])
def test_parts_give_what_the_whole_gives(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch, student: str, texts: int
) -> None:
    own = student == "of my own"
    model, inputs = student_and_inputs(store, "16x2x2" if own else student)
    model = example("own_student").Convolutions(400, 8) if own else model
    maps = "x" in student
    assert len(inputs.ids) > 2 * texts
    monkeypatch.setattr(room, "CPU_BUDGET", 2**60)
    expected = outputs_and_gradients(model, inputs, maps)
    hold(monkeypatch, model, inputs, texts)
    found = outputs_and_gradients(model, inputs, maps)
    assert len(found) == len(expected)
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def test_a_part_drops_the_same_in_both_passes(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = student_and_inputs(store, "16x2x2", dropout=0.3)
    model.train()

    def gradient(again: bool) -> Tensor:
        torch.manual_seed(3)
        model.zero_grad()
        if again:
            last = forward_pass(model, inputs).last
        else:  # the parts by hand, with all activations stored
            last = torch.cat([forward_pass(model, part).last for part in inputs.split(2)])
        last.square().sum().backward()
        weight: Tensor = next(model.parameters())
        assert weight.grad is not None
        return weight.grad.clone()

    hold(monkeypatch, model, inputs, 2)
    assert torch.equal(gradient(again=True), gradient(again=False))


@pytest.mark.parametrize("student", ["16x2x2", "modernbert:16x2x2", "bilstm:12,10"])
def test_less_is_held(store: FeatureStore, monkeypatch: pytest.MonkeyPatch, student: str) -> None:
    model, inputs = student_and_inputs(store, student)

    def held() -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            last = forward_pass(model, inputs).last
        assert last.requires_grad
        weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        return sum(size for at, size in kept.items() if at not in weights)

    whole = held()
    hold(monkeypatch, model, inputs, 2)
    assert held() < whole / 4


def test_a_training_in_parts_is_the_training(
    store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> list[float]:
        model, collator, options = prepared(store, loss=LOSS, steps=6, lr=1e-2)
        seen: list[float] = []
        train(store, model, collator, options, on_step=lambda _, found: seen.append(found["loss"]))
        return seen

    whole = losses()
    monkeypatch.setattr(room, "CPU_BUDGET", 1)
    assert losses() == pytest.approx(whole, rel=1e-3)
    assert whole[-1] < whole[0]


def test_a_text_counts_as_its_square_where_attention_is_eager(store: FeatureStore) -> None:
    model, _ = student_and_inputs(store, "16x2x2")
    states = 2 * 34 * 16 * 100
    assert bytes_of_text(model, 100) == states + 2 * 5 * 2 * 100**2
    model.set_attn_implementation("sdpa")
    assert bytes_of_text(model, 100) == states
    assert bytes_of_text(student_and_inputs(store, "static:16")[0], 100) == 1
