"""Learning rates, calculated by hand: linear decay, cosine decay, and a decay at the end."""

from __future__ import annotations

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from teachonce.training.optimizer import Schedule


def test_a_constant_rate_stays_after_warm_up() -> None:
    constant = Schedule("constant", 100, 10)
    assert [constant.factor(step) for step in (0, 9, 10, 99, 200)] == [0.1, 1, 1, 1, 1]


def test_patience_counts_validations_since_the_best() -> None:
    schedule, endless = Schedule("linear", 100, 0, patience=2), Schedule("plateau", 100, 0)
    over = []
    for loss in (3.0, 4.0, 2.0, 2.0, 1.0, 1.5, 1.2):
        schedule.validated(loss)
        endless.validated(loss)
        over.append(schedule.is_over)
    assert over == [False] * 6 + [True] and not endless.is_over


@pytest.mark.parametrize(("kind", "third"), [("linear", 2 / 3), ("cosine", 0.75)])
def test_both_go_down_to_their_end(kind: str, third: float) -> None:
    schedule = Schedule(kind, 100, 10, end=0.2)
    assert schedule.factor(4) == 0.5 and schedule.factor(10) == 1.0
    assert schedule.factor(40) == pytest.approx(0.2 + 0.8 * third)
    assert schedule.factor(100) == schedule.factor(120) == pytest.approx(0.2)


def test_after_warm_up_it_is_the_cosine_of_transformers() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    rates = []
    for _ in range(100):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = [Schedule("cosine", 100, 10).factor(step) for step in range(100)]
    assert ours[10:] == pytest.approx(rates[10:])
