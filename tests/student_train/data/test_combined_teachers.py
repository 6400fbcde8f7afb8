"""Several teachers combined into one: the geometric mean of distributions, the mean of everything
else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from teachonce.student_train.data.batch import Distillation, Inputs, Runs, StudentBatch
from teachonce.student_train.data.combined_teachers import combine_teachers, geometric_mean
from teachonce.student_train.data.targets import fold
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets, logit
from teachonce.support.arrays import Array
from tests.student_train.kept_logits import V_TEACHER, kept_logits, teacher_logits

SAME = np.arange(V_TEACHER)  # the student has the teachers' vocabulary


def kept(seed: int, k: int) -> LogitTargets:
    targets, some = fold(*kept_logits(seed, k), SAME)
    assert some.all()
    return targets


def softmax(logits: Array) -> Array:
    found: Array = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return found


def spread(targets: LogitTargets) -> torch.Tensor:
    """Return probabilities [G,V] with the rest spread evenly over the pieces that are not
    stored."""
    count = targets.valid.sum(1)
    share = targets.rest.exp() / (V_TEACHER - count).clamp(min=1)
    found = share[:, None].expand(-1, V_TEACHER).clone()
    for row in range(len(found)):
        valid = targets.valid[row]
        found[row, targets.ids[row, valid]] = targets.logprobs[row, valid].exp()
    return found


def test_of_whole_distributions_it_is_the_softmax_of_the_mean_logits() -> None:
    joined = geometric_mean([kept(1, V_TEACHER), kept(2, V_TEACHER)], V_TEACHER)
    mean = (teacher_logits(1) + teacher_logits(2)) / 2
    np.testing.assert_allclose(spread(joined).numpy(), softmax(mean), atol=1e-5)
    assert (joined.valid.sum(1) == V_TEACHER).all()
    # the loss of logits compares with the mean of the logits themselves
    assert logit(torch.from_numpy(mean), joined).item() == pytest.approx(0, abs=1e-8)


def test_of_kept_pieces_each_teacher_spreads_what_it_leaves_over() -> None:
    one, two, three = kept(1, 3), kept(2, 5), kept(3, 4)
    joined = geometric_mean([one, two, three], V_TEACHER)
    product = spread(one) * spread(two) * spread(three)
    want = product ** (1 / 3) / (product ** (1 / 3)).sum(1, keepdim=True)
    torch.testing.assert_close(spread(joined), want, rtol=1e-4, atol=1e-6)
    total = spread(joined).sum(1)
    torch.testing.assert_close(total, torch.ones_like(total))
    for row in range(len(total)):  # all pieces that either teacher stores, each once
        pieces = joined.ids[row, joined.valid[row]].tolist()
        every = {p for each in (one, two, three) for p in each.ids[row, each.valid[row]].tolist()}
        assert sorted(pieces) == sorted(every)


def test_a_teacher_joined_with_itself_is_itself() -> None:
    one = kept(4, 6)
    joined = geometric_mean([one, one], V_TEACHER)
    torch.testing.assert_close(spread(joined), spread(one), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(joined.rest, one.rest, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined.log_partition, one.log_partition, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_leaves_nothing_over_keeps_the_mean_finite() -> None:
    sure = LogitTargets(
        torch.tensor([[3]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([-torch.inf]), torch.zeros(1),
    )  # fmt: skip
    other = LogitTargets(
        torch.tensor([[5]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([-torch.inf]), torch.zeros(1),
    )  # fmt: skip
    joined = geometric_mean([sure, other], V_TEACHER)
    assert joined.ids.tolist() == [[3, 5]]
    torch.testing.assert_close(joined.logprobs.exp(), torch.tensor([[0.5, 0.5]]))


def test_each_alignment_is_joined_for_itself_and_logits_of_shared_pieces_are_averaged() -> None:
    def taught(by: float, count: int) -> Distillation:
        runs = Runs.of(np.array([[n, n + 1] for n in range(count)]))
        ids, valid = torch.arange(3).expand(count, 3), torch.ones(count, 3, dtype=torch.bool)
        shared = SharedTargets(ids, torch.full((count, 3), by), valid)
        states = {"mean": torch.full((count, 2), by)}
        decoded = {"normalised": states}
        return Distillation(None, runs, runs, None, shared, None, None, None, decoded=decoded)

    def batch(by: float) -> StudentBatch:
        inputs = Inputs.of(np.arange(4), np.array([0, 4]), 0)
        aligned = {"match": taught(by, 2), "span": taught(10 * by, 3)}
        return StudentBatch(inputs, torch.arange(0), torch.arange(0), 4, aligned)

    found = combine_teachers([batch(1.0), batch(4.0)], V_TEACHER).aligned
    for name, mean, count in (("match", 2.5, 2), ("span", 25.0, 3)):
        shared = found[name].shared
        assert shared is not None and torch.equal(shared.logits, torch.full((count, 3), mean))
        assert torch.equal(found[name].normalised["mean"], torch.full((count, 2), mean))
