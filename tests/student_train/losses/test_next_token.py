"""The losses of next tokens, against their definitions in NumPy over the whole vocabulary."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from teachonce.student_train.losses.next_token import (
    NextTargets,
    WholeTargets,
    alm,
    jsd,
    kl,
    next_inside,
    next_token,
    reverse_kl,
)
from teachonce.support.arrays import Array

V, G = 7, 5
chance = np.random.default_rng(4)


def log_softmax(values: Array) -> Array:
    found: Array = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return found


def targets_of(logprobs: Array, size: int) -> NextTargets:
    """Store the `size` best pieces of each row and the rest; the most likely piece is the next
    token."""
    best = np.argsort(-logprobs, axis=1)[:, :size]
    stored = np.take_along_axis(logprobs, best, axis=1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(1 - np.exp(stored).sum(axis=1), 0))
    return NextTargets(
        ids=torch.from_numpy(best.astype(np.int64)),
        logprobs=torch.from_numpy(stored.astype(np.float32)),
        valid=torch.ones(len(best), size, dtype=torch.bool),
        rest=torch.from_numpy(rest.astype(np.float32)),
        log_partition=torch.zeros(len(best)),
        following=torch.from_numpy(best[:, 0].astype(np.int64)),
    )


def test_tokens_inside_those_of_the_teacher_count_by_all_tokens() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0], requires_grad=True)
    inside = torch.tensor([False, True, False, True])
    found = next_inside(logprobs, inside)
    found.backward()
    assert found.item() == (2 + 8) / 4
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0, -0.25, 0, -0.25]
    others = next_inside(logprobs, ~inside)
    assert (found + others).item() == next_token(logprobs).item()
    assert str(next_inside(logprobs, torch.zeros(4, dtype=torch.bool)).item()) == "0.0"


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_over_a_whole_vocabulary_is_the_dense_one(beta: float, temperature: float) -> None:
    teacher, student = (log_softmax(chance.normal(0, 2, (G, V))) for _ in range(2))
    p, q = (np.exp(log_softmax(each / temperature)) for each in (teacher, student))
    m = beta * p + (1 - beta) * q
    rows = beta * p * np.log(p / m) + (1 - beta) * q * np.log(q / m)
    own = torch.from_numpy(student.astype(np.float32)).requires_grad_()
    targets = targets_of(teacher, V)
    found = jsd(targets.predictions(own), targets, temperature, beta=beta)
    expected = rows.sum(axis=1).mean() * temperature**2
    assert float(found.detach()) == pytest.approx(float(expected), abs=1e-6)
    found.backward()
    assert own.grad is not None and bool(torch.isfinite(own.grad).all())


def test_jsd_lies_between_the_two_divergences() -> None:
    """JSD divided by B becomes KL for small B, and by 1 - B reverse KL for large B (GKD, section
    2)."""
    teacher, student = (log_softmax(chance.normal(0, 1, (G, V))) for _ in range(2))
    logits = torch.from_numpy(student.astype(np.float32))
    targets, same = targets_of(teacher, 4), targets_of(student, 4)
    own = targets.predictions(logits)
    # Without the term for the rest, which contains none of the next pieces.
    low, high = (float(jsd(own, targets, 1.0, beta=beta)) for beta in (1e-3, 1 - 1e-3))
    assert low / 1e-3 == pytest.approx(float(kl(own, targets, 1.0)), rel=0.01)
    assert high / 1e-3 == pytest.approx(float(reverse_kl(own, targets, 1.0)), rel=0.01)
    assert float(jsd(same.predictions(logits), same, 1.0)) == pytest.approx(0, abs=1e-6)


def test_a_piece_of_the_rest_is_learnt_from_the_text_by_jsd() -> None:
    teacher = log_softmax(chance.normal(0, 1, (G, V)))
    targets = targets_of(teacher, 3)
    rare = torch.from_numpy(np.argsort(-teacher, axis=1)[:, -1].astype(np.int64))
    own = torch.zeros(G, V, requires_grad=True)
    targets = NextTargets(**{**vars(targets), "following": rare})
    jsd(targets.predictions(own), targets, 1.0).backward()
    assert own.grad is not None
    others = [v for v in range(V) if v not in {*targets.ids[0].tolist(), int(rare[0])}]
    assert float(own.grad[0, rare[0]]) < min(float(own.grad[0, v]) for v in others)


def test_alm_is_a_divergence_of_two_outcomes() -> None:
    """The run and anything else, each with the power 1/T (equation 5)."""
    teacher, student = (-chance.exponential(3, G) for _ in range(2))
    for flatness in (1.0, 100.0):
        p, q = (np.exp(each / flatness) for each in (teacher, student))
        expected = flatness * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
        own, theirs = (torch.from_numpy(each) for each in (student, teacher))
        assert float(alm(own, theirs, flatness)) == pytest.approx(float(expected), abs=1e-9)
    a, b = -teacher, -student
    wanted = (a * np.log(a / b) - a + b).mean()
    far = alm(torch.from_numpy(student), torch.from_numpy(teacher), flatness=1e6)
    assert float(far) == pytest.approx(float(wanted), rel=1e-4)


def test_alm_of_certain_and_impossible_runs() -> None:
    student = torch.tensor([0.0, -3.0, -3.0], requires_grad=True)
    found = alm(student, torch.tensor([0.0, 0.0, -torch.inf]))
    found.backward()
    assert student.grad is not None and bool(torch.isfinite(student.grad).all())
    assert float(student.grad[1]) < 0 < float(student.grad[2])
    assert float(alm(torch.zeros(2), torch.zeros(2))) == 0
    nothing = torch.zeros(0, requires_grad=True)
    alm(nothing, torch.zeros(0)).backward()
    assert nothing.grad is not None


@pytest.mark.parametrize("padding", [0, 2])
def test_the_whole_vocabulary_gives_the_losses_of_all_stored_pieces(padding: int) -> None:
    """A model of your own may have more outputs than its tokenizer has pieces."""
    teacher = log_softmax(chance.normal(0, 1, (G, V)))
    none = torch.full((G,), -torch.inf)
    stored = replace(targets_of(teacher, V), rest=none)
    whole = WholeTargets(
        torch.arange(V).expand(G, V),
        torch.from_numpy(teacher.astype(np.float32)),
        stored.valid,
        none,
        stored.log_partition,
        stored.following,
    )
    logits = torch.from_numpy(chance.normal(0, 1, (G, V + padding)).astype(np.float32))
    for loss in (kl, reverse_kl, jsd):
        found = []
        for targets in (stored, whole):
            own = logits.clone().requires_grad_()
            value = loss(targets.predictions(own), targets, 2.0)
            value.backward()
            assert own.grad is not None
            found += [value.detach(), own.grad]
        torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-6)
