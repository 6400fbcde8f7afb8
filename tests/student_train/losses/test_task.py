"""Losses over the classes of a task equal hand computation and direct computation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from teachonce.student_train.losses import task


def test_losses_are_what_their_papers_say() -> None:
    torch.manual_seed(0)
    own, teacher = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    p, q = (teacher / 2).softmax(1), (own / 2).softmax(1)
    by_hand = 4 * (p * (p / q).log()).sum(1).mean()
    assert torch.allclose(task.kl(own, teacher, 2.0), by_hand, atol=1e-6)
    assert torch.allclose(task.kl(teacher, teacher, 2.0), torch.zeros(()), atol=1e-6)
    odds = (teacher.softmax(1) / (1 - teacher.softmax(1))).log()
    assert torch.allclose(task.log_odds(odds, teacher), torch.zeros(()), atol=1e-5)
    certain = torch.tensor([[99.0, 0.0, 0.0]])
    assert task.log_odds(torch.zeros(1, 3), certain).isfinite()
    gold = torch.tensor([2, -1, 0, -1, 1])
    some = functional.cross_entropy(own[[0, 2, 4]], gold[[0, 2, 4]])
    assert torch.equal(task.ce(own, gold), some)
    nothing = task.ce(own, torch.full((5,), -1))
    nothing.backward()
    assert own.grad is not None
    assert float(nothing.detach()) == 0 and float(own.grad.abs().sum()) == 0


def test_losses_of_several_labels_are_binary_ones_of_each_label() -> None:
    torch.manual_seed(0)
    own, teacher = torch.randn(5, 3, requires_grad=True), 3 * torch.randn(5, 3)
    p, q = (teacher / 2).sigmoid(), (own / 2).sigmoid()
    by_hand = 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    assert torch.allclose(task.kl_labels(own, teacher, 2.0), by_hand, atol=1e-6)
    entropy = -(teacher.sigmoid() * functional.logsigmoid(teacher)).mean()
    entropy -= ((-teacher).sigmoid() * functional.logsigmoid(-teacher)).mean()
    ours = functional.binary_cross_entropy_with_logits(own, teacher.sigmoid())  # transformers' own
    assert torch.allclose(task.kl_labels(own, teacher, 1.0), ours - entropy, atol=1e-6)
    yes = functional.binary_cross_entropy_with_logits(own, (teacher.sigmoid() > 0.5).float())
    assert torch.equal(task.hard_labels(own, teacher), yes)
    assert torch.allclose(task.log_odds_labels(teacher, teacher), torch.zeros(()), atol=1e-8)
    certain = torch.tensor([[99.0, -99.0]])
    for loss in (task.hard_labels, task.log_odds_labels, task.half_log_odds_labels):
        assert loss(torch.zeros(1, 2), certain).isfinite()
    assert task.kl_labels(-certain, certain, 1.0).isfinite()


def test_logit_is_the_number_worked_out_by_hand() -> None:
    own, teacher = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert task.logit(own, teacher).item() == pytest.approx((0 + 4 + 9 + 0) / 4)


def test_margins_by_hand() -> None:
    """Differences of 1, 4 and 5 between the student's scores and of 2, 2 and 4 between the
    teacher's give squared errors of 1, 4 and 1. A constant added to all scores changes nothing."""
    student = torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)
    teacher = torch.tensor([[0.0], [2.0], [4.0]])
    value = task.margin(student, teacher)
    assert value.item() == pytest.approx(2.0)
    assert task.margin(student + 7, teacher).item() == pytest.approx(2.0)
    alone = task.margin(student[:1], teacher[:1])
    alone.backward()
    assert alone.item() == 0 and student.grad is not None
