"""The teacher with two vocabularies: its two softmaxes and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from teacher_dump.mixed_vocab.mixed_teacher import MixedTeacher
from teacher_dump.teacher.teacher import load_teacher
from tests.teacher_dump.mixed_vocab.support import WIDTH, mixer_of, some


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "deberta", "electra", "xlmr", "distilbert", "modernbert"]
)
def test_gradients_reach_both_vocabularies_the_map_and_the_teacher(
    kind: str, tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher(kind)), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0)
    (batch,) = some(mixer_of(teacher, small), 1)
    sum(model(batch)).backward()
    words = model.network.get_input_embeddings().weight
    for parameter in (model.student.weight, model.up.weight, model.up.bias, model.student_bias):
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
    assert words.grad is not None and words.grad.abs().sum() > 0
    without = [p for p in model.network.parameters() if p.grad is None]
    assert all(p.shape == model.bias.shape for p in without)  # its place is with the decoder
    assert model.bias.grad is not None and len(without) < 2
    model.zero_grad()
    read = torch.unique(batch.ids[batch.own])
    words = model.student(read)  # the map alone, without the softmax
    model.up(words).sum().backward()
    assert model.student.weight.grad is not None
    assert (model.student.weight.grad.abs().sum(1) > 0).nonzero().flatten().equal(read)


def test_the_teachers_softmax_is_its_own_head(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    """With no word of the student's, the loss is that of transformers' own masked LM."""
    folder = tiny_teacher("bert")
    teacher = load_teacher(str(folder), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small, share=0.0), 1)
    whole = AutoModelForMaskedLM.from_pretrained(folder).eval()
    labels = torch.full(batch.ids.shape, -100)
    labels.view(-1)[batch.rows] = batch.labels
    with torch.no_grad():
        of_teacher, of_student = model(batch)
        expected = whole(
            input_ids=batch.ids, attention_mask=batch.present.long(), labels=labels
        ).loss
    assert of_student == 0
    torch.testing.assert_close(of_teacher / len(batch.labels), expected)


def test_the_students_softmax_is_over_the_projected_embeddings(
    tiny_teacher: Callable[..., Path], small: Any
) -> None:
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small, share=1.0), 1)
    with torch.no_grad():
        embeddings = model.up(model.student.weight)
        states = model.network(
            inputs_embeds=embeddings[batch.ids], attention_mask=batch.present.long()
        ).logits.flatten(0, 1)[batch.rows]
        logits = states @ embeddings.T + model.student_bias
        expected = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        of_teacher, of_student = model(batch)
    assert of_teacher == 0
    torch.testing.assert_close(of_student, expected)
