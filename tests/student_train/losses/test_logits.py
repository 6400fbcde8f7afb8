"""Losses of vocabulary logits equal hand computation and direct computation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from teachonce.student_train.data.targets import fold
from teachonce.student_train.losses.logits import (
    LogitTargets,
    SharedTargets,
    hard,
    kl,
    kl_shared,
    logit,
    outcomes,
)
from tests.student_train.kept_logits import V_STUDENT, V_TEACHER, kept_logits, teacher_logits

LN2 = math.log(2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 3))
def test_slots_that_are_not_valid_change_nothing(seed: int, slots: int) -> None:
    vocabulary = np.random.default_rng(seed).integers(-1, V_STUDENT, V_TEACHER)
    targets, some = fold(*kept_logits(seed, 6), vocabulary)
    if not some.any():
        return
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (int(some.sum()), 12)))
    first = targets.ids.gather(1, targets.valid.int().argmax(dim=1, keepdim=True))
    empty = torch.full((len(first), slots), -torch.inf)
    wider = replace(
        targets,
        ids=torch.cat([targets.ids, first.repeat(1, slots)], dim=1),
        logprobs=torch.cat([targets.logprobs, empty], dim=1),
        valid=torch.cat([targets.valid, torch.zeros_like(empty, dtype=torch.bool)], dim=1),
    )
    assert kl(logits, wider, 2.0).item() == pytest.approx(kl(logits, targets, 2.0).item(), rel=1e-5)
    both = (SharedTargets(each.ids, each.logprobs, each.valid) for each in (wider, targets))
    filled, plain = (kl_shared(logits, each, 2.0).item() for each in both)
    assert filled == pytest.approx(plain, rel=1e-5, abs=1e-9)
    assert torch.equal(logit(logits, wider), logit(logits, targets))
    assert torch.equal(hard(logits, wider), hard(logits, targets))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000), pieces=st.integers(2, 12), scale=st.sampled_from([0.1, 3.0, 200.0])
)
def test_gradients_of_kept_pieces_and_of_their_rest_are_those_of_the_definition(
    seed: int, pieces: int, scale: float
) -> None:
    vocabulary = np.random.default_rng(seed).integers(-1, pieces, V_TEACHER)
    targets, some = fold(*kept_logits(seed, 6), vocabulary)
    generator = torch.Generator().manual_seed(seed)
    shapes = (int(some.sum()), pieces), (len(targets.ids), targets.ids.shape[1] + 1)
    logits, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    logits = (logits * scale).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    following = torch.randint(pieces, shapes[0][:1], generator=generator)
    student, of_following = outcomes(logits, targets, following)
    of_definition = exact.log_softmax(1).gather(1, following[:, None])[:, 0]
    values = [
        (each * weights)[each.isfinite()].sum() + (each.isfinite().sum(1) * each_following).sum()
        for each, each_following in [
            (student, of_following),
            (_by_definition(exact, targets), of_definition),
        ]
    ]
    torch.testing.assert_close(values[0].double(), values[1], rtol=1e-4, atol=1e-4)
    for value in values:
        value.backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def _by_definition(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Log-probabilities [G,K+1] by plain operations; -inf for slots and rests without a piece."""
    rows = []
    for row, ids, valid in zip(logits.log_softmax(1), targets.ids, targets.valid, strict=True):
        kept = torch.zeros(len(row), dtype=torch.bool)
        kept[ids[valid]] = True
        left = row[~kept].logsumexp(0) if not kept.all() else row.new_tensor(-torch.inf)
        rows.append(torch.cat([row[ids].masked_fill(~valid, -torch.inf), left[None]]))
    return torch.stack(rows) if rows else logits.new_zeros(0, targets.ids.shape[1] + 1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_is_that_of_the_grouped_distributions(temperature: float) -> None:
    vocabulary = np.random.default_rng(5).integers(-1, V_STUDENT, V_TEACHER)
    targets, some = fold(*kept_logits(5, 8), vocabulary)
    logits = torch.randn(int(some.sum()), V_STUDENT, generator=torch.Generator().manual_seed(0))
    want = []
    for row in range(len(logits)):
        q = logits[row].softmax(0)
        valid = targets.valid[row]
        pieces = targets.ids[row][valid]
        p = torch.cat([targets.logprobs[row][valid].exp(), targets.rest[row].exp()[None]])
        outcome = torch.cat([q[pieces], (1 - q[pieces].sum())[None]])
        p, outcome = (x ** (1 / temperature) for x in (p, outcome))
        p, outcome = p / p.sum(), outcome / outcome.sum()
        want.append((p * (p / outcome).log()).sum() * temperature**2)
    mean = torch.stack(want).mean().item()
    assert kl(logits, targets, temperature).item() == pytest.approx(mean, rel=1e-4)


def test_kl_is_zero_for_the_same_distribution_and_has_finite_gradients() -> None:
    # Pieces that the student lacks join the rest: without their mass the two would differ.
    shared = np.where(np.arange(V_TEACHER) % 3 > 0, np.arange(V_TEACHER), -1)
    targets, some = fold(*kept_logits(1, V_STUDENT - 4), shared)
    same = torch.from_numpy(teacher_logits(1)[some]).float()
    assert kl(same, targets, 2.0).item() == pytest.approx(0, abs=1e-5)
    assert kl(same.roll(1, dims=1), targets, 2.0).item() > 0.1
    sure = (same * 100).requires_grad_()
    kl(sure, targets, 2.0).backward()
    assert sure.grad is not None and torch.isfinite(sure.grad).all()


def test_logit_and_hard_losses() -> None:
    ids, logprobs, rest, log_partition = kept_logits(3, 4)
    vocabulary = np.where(np.arange(V_TEACHER) < V_STUDENT, np.arange(V_TEACHER), -1)
    targets, some = fold(ids, logprobs, rest, log_partition, vocabulary)
    same = torch.from_numpy(teacher_logits(3)[some][:, :V_STUDENT]).float()
    assert logit(same, targets).item() == pytest.approx(0, abs=1e-4)
    assert logit(same + 1, targets).item() == pytest.approx(1, abs=1e-3)
    best = targets.ids[:, :1].clone()
    for row in range(len(best)):
        valid = targets.valid[row]
        best[row] = targets.ids[row][valid][targets.logprobs[row][valid].argmax()]
    want = torch.nn.functional.cross_entropy(same, best[:, 0])
    assert hard(same, targets).item() == pytest.approx(want.item(), rel=1e-5)
