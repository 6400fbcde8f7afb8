"""Losses of attention maps equal hand computation."""

from __future__ import annotations

import pytest
import torch

from teachonce.student_train.losses.maps import attention

STUDENT = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
TEACHER = torch.tensor([[[0.7, 0.2], [0.25, 0.15]]])
PAIRS = torch.tensor([[[True, True], [True, False]]])


def test_attention_is_the_number_worked_out_by_hand() -> None:
    # squares .04, .09 and 0 of the three pairs that are present
    assert attention(STUDENT, TEACHER, PAIRS).item() == pytest.approx(0.13 / 3, rel=1e-5)
    # and .36 of the fourth
    everything = torch.ones_like(PAIRS)
    assert attention(STUDENT, TEACHER, everything).item() == pytest.approx(0.49 / 4, rel=1e-5)


def test_pairs_that_are_not_present_change_nothing() -> None:
    noise = torch.where(PAIRS, STUDENT, torch.tensor(99.0))
    assert torch.equal(attention(noise, TEACHER, PAIRS), attention(STUDENT, TEACHER, PAIRS))
    nothing = attention(STUDENT.clone().requires_grad_(), TEACHER, torch.zeros_like(PAIRS))
    nothing.backward()
    assert nothing.item() == 0
