"""Losses of states equal hand computation and direct computation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.student_train.losses import states

G = 6


def test_squares_are_averaged_over_channels() -> None:
    both = torch.randn(2, G, 5, generator=torch.Generator().manual_seed(3))
    student, teacher = both.unbind()
    gap = (student - teacher).numpy()
    assert states.hidden(student, teacher).item() == pytest.approx((gap**2).mean(), rel=1e-5)
    squared = ((torch.nn.functional.gelu(student) - teacher) ** 2).mean().item()
    assert states.hidden_gelu(student, teacher).item() == pytest.approx(squared, rel=1e-5)


def test_contrastive_is_the_number_worked_out_by_hand() -> None:
    student = torch.tensor([[1.0, 0.0], [5.0, 0.0]])
    teacher = torch.tensor([[0.8, 0.6], [1.2, 1.6]])
    # Cosines .8 and .6 in both rows, times 20: 16 and 12. The positive of row 1 is the first, of
    # row 2 the second: ln(1 + e^-4) and ln(1 + e^4).
    want = (math.log1p(math.exp(-4)) + math.log1p(math.exp(4))) / 2
    assert want == pytest.approx(2.0181499)
    assert states.contrastive(student, teacher).item() == pytest.approx(want, rel=1e-5)


def test_contrastive_tells_512_runs_apart_and_leaves_the_others_out() -> None:
    student, teacher = torch.randn(2, 514, 4, generator=torch.Generator().manual_seed(0)).unbind()
    some = states.contrastive(student[:512], teacher[:512])
    assert torch.equal(states.contrastive(student, teacher), some)
    assert not torch.equal(states.contrastive(student[:511], teacher[:511]), some)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 8))
def test_the_order_of_the_runs_changes_no_loss(seed: int, count: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, count, 5, generator=chance).unbind()
    order = torch.randperm(count, generator=chance)
    for loss in (states.hidden, states.hidden_sum, states.hidden_gelu, states.hidden_kld,
                 states.cosine, states.contrastive):  # fmt: skip
        found, same = loss(student, teacher).item(), loss(student[order], teacher[order]).item()
        assert same == pytest.approx(found, rel=1e-4, abs=1e-6), loss.__name__
