"""The teacher with two vocabularies: its two softmaxes and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from teachonce.support.errors import UserError
from teachonce.teacher_dump.mixed_vocab.embedding_training import MixedTeacher
from teachonce.teacher_dump.mixed_vocab.stage_one import shared_pieces
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.making.models import Teachers
from tests.teacher_dump.mixed_vocab.support import WIDTH, mixer_of, some


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "deberta", "electra", "xlmr", "distilbert", "modernbert"]
)
def test_gradients_reach_both_vocabularies_the_map_and_the_teacher(
    kind: str, tiny_teacher: Teachers, small: Any
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
    assert all(p.shape == model.bias.shape for p in without)  # the decoder contains it
    assert model.bias.grad is not None and len(without) < 2
    model.zero_grad()
    read = torch.unique(batch.ids[batch.own])
    words = model.student(read)  # the map alone, without the softmax
    model.up(words).sum().backward()
    assert model.student.weight.grad is not None
    assert (model.student.weight.grad.abs().sum(1) > 0).nonzero().flatten().equal(read)


def test_the_teachers_softmax_is_its_own_head(tiny_teacher: Teachers, small: Any) -> None:
    """Without words in the student's vocabulary, the loss equals transformers' masked LM loss."""
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


def test_tied_pieces_have_one_embedding(tiny_teacher: Teachers, small: Any) -> None:
    """A piece of both vocabularies has one embedding, the student's, for input and for output."""
    folder = tiny_teacher("bert")
    teacher = load_teacher(str(folder), head="mlm", hidden="none", attention="none")
    same = shared_pieces(teacher.tokenizer, small)
    names, own = teacher.tokenizer.get_vocab(), small.get_vocab()
    assert {same[names[piece]] == own[piece] for piece in names.keys() & own.keys()} == {True}
    assert 100 < (same >= 0).sum() == len(names.keys() & own.keys()) < len(names)
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0, same=same).eval()
    whole: Any = AutoModelForMaskedLM.from_pretrained(folder).eval()
    rows, ids = (torch.from_numpy(each) for each in ((same >= 0).nonzero()[0], same[same >= 0]))
    words = whole.get_input_embeddings().weight
    with torch.no_grad():
        tied = model.up(model.student(ids))
        # the best initial value at that rank, also used by the head
        kept = (words[rows] - words[rows].mean(0)).norm() ** 2 - (tied - words[rows]).norm() ** 2
        spread = torch.linalg.svdvals(words[rows] - words[rows].mean(0)) ** 2
        torch.testing.assert_close(kept, spread[:WIDTH].sum(), rtol=1e-3, atol=1e-4)
        words[rows] = tied
        whole.cls.predictions.decoder.weight[rows] = tied
    (batch,) = some(mixer_of(teacher, small, share=0.0), 1)
    labels = torch.full(batch.ids.shape, -100)
    labels.view(-1)[batch.rows] = batch.labels
    with torch.no_grad():
        expected = whole(
            input_ids=batch.ids, attention_mask=batch.present.long(), labels=labels
        ).loss
    of_teacher, _ = model(batch)
    torch.testing.assert_close(of_teacher.detach() / len(batch.labels), expected)
    of_teacher.backward()  # so the teacher's words alone train the student's embeddings
    assert model.student.weight.grad is not None
    moved = model.student.weight.grad.abs().sum(1) > 0
    assert moved[ids].all() and not moved[sorted(set(range(len(small))) - set(ids.tolist()))].any()
    own_words = model.network.get_input_embeddings().weight.grad
    assert own_words is not None and not own_words[rows].any()


def test_pieces_of_another_kind_are_not_tied(tiny_teacher: Teachers, small: Any) -> None:
    teacher = load_teacher(str(tiny_teacher("roberta")), hidden="none", attention="none")
    with pytest.raises(UserError, match="--tie: .* is a BPE and the student's a WordPiece"):
        shared_pieces(teacher.tokenizer, small)


def test_the_students_softmax_is_over_the_projected_embeddings(
    tiny_teacher: Teachers, small: Any
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


def test_the_loss_of_stage_one_is_equation_1(tiny_teacher: Teachers, small: Any) -> None:
    """The loss is eq. 1 of Zhao et al. 2021, in NumPy: the sum of minus the log-probability of each
    masked piece, under the softmax of the vocabulary of its word."""
    teacher = load_teacher(str(tiny_teacher("bert")), head="mlm", hidden="none", attention="none")
    model = MixedTeacher(teacher, len(small), WIDTH, seed=0).eval()
    (batch,) = some(mixer_of(teacher, small), 1)
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    words = model.network.get_input_embeddings().weight.detach().double().numpy()
    own = weights["student.weight"] @ weights["up.weight"].T + weights["up.bias"]
    ids, of_student = batch.ids.numpy(), batch.own.numpy()
    read = np.where(of_student[..., None], own[ids % len(own)], words[ids % len(words)])
    with torch.no_grad():
        states = model.network(
            inputs_embeds=torch.from_numpy(read).float(), attention_mask=batch.present.long()
        ).logits.flatten(0, 1)[batch.rows]
        found = model(batch)
    wanted = np.zeros(2)
    for state, piece, side in zip(
        states.double().numpy(), batch.labels.numpy(), batch.labels_own.numpy(), strict=True
    ):
        table, bias = (own, "student_bias") if side else (weights["weight"], "bias")
        scores = table @ state + weights[bias]
        wanted[int(side)] -= (
            scores[piece] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        )
    assert wanted.all() and [float(each) for each in found] == pytest.approx(wanted, rel=1e-4)
