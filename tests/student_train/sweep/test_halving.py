"""Asynchronous successive halving: which runs go on."""

from __future__ import annotations

from teachonce.student_train.sweep.halving import Halving


def test_the_best_third_of_those_that_came_as_far_goes_on() -> None:
    halving = Halving()
    assert halving.judge(1, 10, 5.0) == ""  # nobody else came as far
    told = halving.judge(2, 20, 6.0)
    assert told == "not among the best third of 2 at validation 1 (step 20; ASHA)"
    assert halving.judge(3, 10, 4.0) == "" and halving.judge(4, 10, 4.5) == ""
    assert halving.judge(5, 10, 4.7) != ""
    assert halving.judge(1, 20, 9.0) == ""  # the 2nd validation ends nobody
    assert halving.judge(3, 20, 9.0) == ""
    assert halving.judge(1, 30, 3.0) == "" and "best third of 2" in halving.judge(3, 30, 3.5)


def test_a_validation_that_is_told_again_counts_once() -> None:
    halving = Halving()
    for _ in range(5):
        assert halving.judge(1, 10, 2.0) == ""
    assert "of 2 at validation 1" in halving.judge(2, 10, 3.0)
    assert halving.judge(2, 10, 1.0) == ""  # resumed, it did better


def test_equals_stay_together() -> None:
    halving = Halving()
    assert not any(halving.judge(run, 1, 1.0) for run in range(6))
