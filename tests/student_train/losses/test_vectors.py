"""Losses of text vectors equal hand computation, and are invariant where they must be."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teachonce.student_train.losses.registry import named
from teachonce.student_train.losses.vectors import SHARPNESS, similarity, similarity_kl

LOSSES = (similarity, similarity_kl)


def vectors(seed: int, count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_similarity_by_hand() -> None:
    """Cosines 0 and 0.6 of one pair give a squared error of 0.36 on both sides of the diagonal."""
    student = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    teacher = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0]])
    assert similarity(student, teacher).item() == pytest.approx(0.36)
    three = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    other = torch.eye(3)
    wanted = 2 * (0.6**2 + 0.8**2 + 0.0) / 6
    assert similarity(three, other).item() == pytest.approx(wanted)


def test_similarity_kl_by_hand() -> None:
    """Each of three texts has two others: with cosines 0 and c the probability of one is a
    sigmoid."""
    teacher = torch.eye(3)  # both others are as likely
    student = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    p = 1 / (1 + math.exp(-SHARPNESS * 0.6))
    unsure = 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p))
    assert similarity_kl(student, teacher).item() == pytest.approx(2 * unsure / 3, rel=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
@given(seed=st.integers(0, 2**31), count=st.integers(2, 9))
def test_angles_alone_count(loss: object, seed: int, count: int) -> None:
    """A common rotation or a scaling of the vectors changes no loss."""
    assert callable(loss)
    teacher = vectors(seed, count, 5)
    turn, _ = torch.linalg.qr(vectors(seed + 1, 5, 5))
    lengths = vectors(seed + 2, count, 1).abs() + 0.1
    assert loss((teacher @ turn) * lengths, teacher).item() == pytest.approx(0, abs=1e-5)
    student = vectors(seed + 3, count, 3)
    found = loss(student, teacher).item()
    assert loss(student * lengths, teacher).item() == pytest.approx(found, abs=1e-4)
    assert found >= 0


@pytest.mark.parametrize("loss", LOSSES)
def test_batches_without_pairs_teach_nothing(loss: Callable[..., torch.Tensor]) -> None:
    student = vectors(0, 1, 4).requires_grad_()
    value = loss(student, vectors(1, 1, 4))
    value.backward()
    assert value.item() == 0 and student.grad is not None


@pytest.mark.parametrize("name", ("embedding", "in-batch", "similarity", "similarity-kl"))
def test_gradients_lead_to_the_teacher(name: str) -> None:
    (loss,) = named([name])
    teacher = vectors(0, 6, 4)
    student = (teacher + 0.5 * vectors(1, 6, 4)).requires_grad_()
    before = loss.function(student, teacher)
    before.backward()
    assert student.grad is not None
    with torch.no_grad():
        after = loss.function(student - 0.05 * student.grad / student.grad.norm(), teacher)
    assert after < before.detach()
