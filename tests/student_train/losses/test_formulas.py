"""Losses against direct computation on small numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from student_train.data.pooling import MapPooling, Runs
from student_train.data.targets import fold
from student_train.losses import logits as of_logits
from student_train.losses import states

G, V_TEACHER, V_STUDENT = 6, 40, 12


def teacher_side(seed: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (G, V_TEACHER))
    log_partition = np.log(np.exp(logits).sum(1))
    ids = np.argsort(-logits, axis=1)[:, :k]
    logprobs = np.take_along_axis(logits, ids, 1) - log_partition[:, None]
    rest = np.log(np.maximum(0, 1 - np.exp(logprobs).sum(1)))
    return ids, logprobs, rest, log_partition


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 20))
def test_folding_keeps_all_mass_and_names_each_piece_once(seed, k):
    vocabulary = np.random.default_rng(seed).integers(-1, V_STUDENT, V_TEACHER)
    ids, logprobs, rest, log_partition = teacher_side(seed, k)
    targets, some = fold(ids, logprobs, rest, log_partition, vocabulary)
    assert some.tolist() == (vocabulary[ids] >= 0).any(1).tolist()
    kept = torch.where(targets.valid, targets.logprobs.exp(), 0).sum(1)
    torch.testing.assert_close(
        kept + targets.rest.exp(), torch.ones(int(some.sum())), atol=1e-5, rtol=0
    )
    for row, g in enumerate(np.flatnonzero(some)):
        valid = targets.valid[row]
        pieces = targets.ids[row][valid].tolist()
        assert len(set(pieces)) == len(pieces)
        for piece, logprob in zip(pieces, targets.logprobs[row][valid].tolist(), strict=True):
            want = np.exp(logprobs[g][vocabulary[ids[g]] == piece]).sum()
            assert np.exp(logprob) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_is_that_of_the_grouped_distributions(temperature):
    vocabulary = np.random.default_rng(5).integers(-1, V_STUDENT, V_TEACHER)
    targets, some = fold(*teacher_side(5, 8), vocabulary)
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
    assert of_logits.kl(logits, targets, temperature).item() == pytest.approx(
        torch.stack(want).mean().item(), rel=1e-4
    )


def test_kl_is_zero_for_the_same_distribution_and_has_finite_gradients():
    ids, logprobs, rest, log_partition = teacher_side(1, V_STUDENT - 4)
    identity = np.where(np.arange(V_TEACHER) < V_TEACHER, np.arange(V_TEACHER), -1)
    targets, _ = fold(ids, logprobs, rest, log_partition, identity)
    same = torch.zeros(G, V_TEACHER)
    rng = np.random.default_rng(1)
    same += torch.from_numpy(rng.normal(0, 3, (G, V_TEACHER))).float()
    assert of_logits.kl(same, targets, 2.0).item() == pytest.approx(0, abs=1e-5)
    sure = (same * 100).requires_grad_()
    of_logits.kl(sure, targets, 2.0).backward()
    assert torch.isfinite(sure.grad).all()


def test_draws_without_a_rest_give_finite_losses():
    ids, logprobs, _, log_partition = teacher_side(2, 5)
    shares = np.exp(logprobs) / np.exp(logprobs).sum(1, keepdims=True)
    targets, _ = fold(ids, np.log(shares), np.full(G, -np.inf), log_partition, np.arange(V_TEACHER))
    logits = torch.randn(G, V_TEACHER, requires_grad=True)
    loss = of_logits.kl(logits, targets, 1.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def test_logit_and_hard_losses():
    ids, logprobs, rest, log_partition = teacher_side(3, 4)
    vocabulary = np.where(np.arange(V_TEACHER) < V_STUDENT, np.arange(V_TEACHER), -1)
    targets, some = fold(ids, logprobs, rest, log_partition, vocabulary)
    teacher_logits = np.random.default_rng(3).normal(0, 3, (G, V_TEACHER))[some][:, :V_STUDENT]
    same = torch.from_numpy(teacher_logits).float()
    assert of_logits.logit(same, targets).item() == pytest.approx(0, abs=1e-4)
    assert of_logits.logit(same + 1, targets).item() == pytest.approx(1, abs=1e-3)
    best = targets.ids[:, :1].clone()
    for row in range(len(best)):
        valid = targets.valid[row]
        best[row] = targets.ids[row][valid][targets.logprobs[row][valid].argmax()]
    want = torch.nn.functional.cross_entropy(same, best[:, 0])
    assert of_logits.hard(same, targets).item() == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_pooling_runs(how):
    values = torch.arange(12.0).reshape(6, 2)
    runs = Runs.of(np.array([[0, 1], [1, 4], [5, 6]]))
    divisor = 3 if how == "mean" else 1
    want = torch.stack([values[0], values[1:4].sum(0) / divisor, values[5]])
    torch.testing.assert_close(runs.pool(values, how), want)
    constant = Runs.of(np.array([[0, 2], [2, 6]])).pool(torch.ones(6, 3), "mean")
    torch.testing.assert_close(constant, torch.ones(2, 3))


def test_pooling_maps_adds_up_what_is_attended_and_averages_who_asks():
    maps = torch.tensor(
        [[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], [[0.6, 0.4, 0], [1, 0, 0], [0, 0, 0]]]
    )
    pooling = MapPooling.of(np.array([[0, 2], [2, 3], [3, 4]]), np.array([0, 3, 5]))
    pooled = pooling.pool(maps)
    torch.testing.assert_close(pooled[0], torch.tensor([[0.85, 0.15], [0.6, 0.4]]))
    assert pooling.present.tolist() == [[True, True], [True, False]]
    assert pooled[1, 0, 0] == pytest.approx(0.6)


def test_a_batch_without_masked_tokens_or_runs_has_a_zero_loss_with_a_gradient():
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = of_logits.mlm(logits, torch.zeros(0, dtype=torch.long)) + states.hidden(
        torch.zeros(0, 4), torch.zeros(0, 4)
    )
    loss.backward()
    assert loss.item() == 0


def test_losses_of_states_are_their_formulas():
    student, teacher = torch.randn(2, G, 5, generator=torch.Generator().manual_seed(3)).unbind()
    gap = (student - teacher).numpy()
    assert states.hidden(student, teacher).item() == pytest.approx((gap**2).mean(), rel=1e-5)
    summed = (gap**2).sum(1).mean()
    assert states.hidden_sum(student, teacher).item() == pytest.approx(summed, rel=1e-5)
    angle = (student * teacher).sum(1) / (student.norm(dim=1) * teacher.norm(dim=1))
    assert states.cosine(student, teacher).item() == pytest.approx(
        1 - angle.mean().item(), rel=1e-5
    )
    p, gelu = teacher.softmax(1), torch.nn.functional.gelu(student)
    squared = ((gelu - teacher) ** 2).mean().item()
    assert states.hidden_gelu(student, teacher).item() == pytest.approx(squared, rel=1e-5)
    divergence = (p * (p.log() - gelu.log_softmax(1))).sum(1).mean().item()
    assert states.hidden_kld(student, teacher).item() == pytest.approx(divergence, rel=1e-4)
