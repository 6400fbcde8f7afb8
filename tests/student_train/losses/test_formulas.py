"""Losses equal hand computation and direct computation.

- Losses of vocabulary logits equal hand computation and direct computation.
- Losses of attention maps equal hand computation.
- Losses of states equal hand computation and direct computation.
- Losses over the classes of a task equal hand computation and direct computation.
- Losses of text vectors equal hand computation, and are invariant where they must be.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from teachonce.student_train.data.distributions import fold
from teachonce.student_train.losses import states, task
from teachonce.student_train.losses.logits import (
    LogitTargets,
    SharedTargets,
    hard,
    kl,
    kl_shared,
    logit,
    outcomes,
)
from teachonce.student_train.losses.maps import attention
from teachonce.student_train.losses.registry import named
from teachonce.student_train.losses.vectors import SHARPNESS, similarity, similarity_kl
from tests.student_train.support import V_STUDENT, V_TEACHER, kept_logits, teacher_logits


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
def test_gradients_of_kept_pieces_and_of_their_rest_match_the_definition(
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
def test_kl_matches_the_grouped_distributions(temperature: float) -> None:
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


def test_contrastive_compares_512_runs_and_leaves_the_others_out() -> None:
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
