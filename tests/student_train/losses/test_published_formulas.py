"""Losses against their definitions, written in NumPy from the source alone.

- Each loss with a source equals its published equation, written in NumPy from the source alone.
  Shape letters: G runs or texts, D teacher hidden size, V pieces, C classes. Sums over a data set
  become means over G, as a training draws its batches from the data set; everything else follows
  the equation.
- The losses of next tokens, against their definitions in NumPy over the whole vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from teachonce.student_train.losses.logits import SharedTargets
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
from teachonce.student_train.losses.registry import losses_for
from teachonce.student_train.settings.recipe import all_recipes
from teachonce.support.arrays import Array, Floats

RANDOM = np.random.default_rng(35)
G, D, V, C = 7, 12, 20, 5
TEMPERATURE = 2.0


def drawn(*shape: int) -> Floats:
    found: Floats = RANDOM.normal(size=shape).astype(np.float32)
    return found


def softmax(scores: Floats) -> Floats:
    powers: Floats = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def gelu(values: Floats) -> Floats:
    """Return x times the normal distribution function (Hendrycks & Gimpel 2016)."""
    below = np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)(values.astype(np.float64))
    found: Floats = values * below
    return found


def kullback_leibler(p: Floats, q: Floats) -> float:
    return float((p * np.log(p / q)).sum(axis=-1).mean())


Measure = Callable[..., Tensor]


def masked_lm(measure: Measure) -> tuple[float, Tensor]:
    """Kolesnikova, eq. 1; Zhao, eq. 2: minus the log-probability of the masked token."""
    scores, gold = drawn(G, V), RANDOM.integers(V, size=G)
    wanted = -np.log(softmax(scores)[np.arange(G), gold]).mean()
    return float(wanted), measure(torch.tensor(scores), torch.tensor(gold))


def shared_kl(measure: Measure) -> tuple[float, Tensor]:
    """Kolesnikova, eq. 2 and footnote 3, 4 and 8: KL over the matching pieces of both sides (the
    thesis, 3.19: over all pieces); T squared as in Hinton et al. 2015, section 2."""
    own, teacher, shared = drawn(G, V), drawn(G, V), np.array([2, 3, 5, 7, 11, 13])
    p, q = (softmax(each[:, shared] / TEMPERATURE) for each in (teacher, own))
    targets = SharedTargets(
        torch.tensor(shared).expand(G, -1), torch.tensor(teacher[:, shared]),
        torch.ones(G, len(shared), dtype=torch.bool),
    )  # fmt: skip
    found = measure(torch.tensor(own), targets, TEMPERATURE)
    return kullback_leibler(p, q) * TEMPERATURE**2, found


def squared_states(measure: Measure) -> tuple[float, Tensor]:
    """Kolesnikova, B.2, 4, the sum over the channels of a token."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = ((own.astype(np.float64) - teacher) ** 2).sum(axis=1).mean()
    return float(wanted), measure(torch.tensor(own), torch.tensor(teacher))


def cosines(measure: Measure) -> tuple[float, Tensor]:
    """Kolesnikova, eq. 3; the thesis's cosine embedding loss."""
    own, teacher = drawn(G, D), drawn(G, D)
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(teacher, axis=1)
    wanted = (1 - (own * teacher).sum(axis=1) / lengths).mean()
    return float(wanted), measure(torch.tensor(own), torch.tensor(teacher))


def attention_maps(measure: Measure) -> tuple[float, Tensor]:
    """Kolesnikova, 4.1: squared error of averaged maps, the mean over their cells."""
    own, teacher = softmax(drawn(2, G, G)), softmax(drawn(2, G, G))
    present = torch.ones(2, G, G, dtype=torch.bool)
    one, other = (torch.tensor(each, dtype=torch.float32) for each in (own, teacher))
    return float(((own - teacher) ** 2).mean()), measure(one, other, present)


def gold_labels(measure: Measure) -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 3, whose sign the paper omits; 2020, eq. 2."""
    scores, gold = drawn(G, C), RANDOM.integers(C, size=G)
    wanted = -np.log(softmax(scores)[np.arange(G), gold]).mean()
    return float(wanted), measure(torch.tensor(scores), torch.tensor(gold))


def log_odds(measure: Measure) -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 5, and section 4.1: logit(p) = log(p / (1 - p)); 2020, eq.
    4."""
    own, teacher = drawn(G, C), drawn(G, C)
    p = softmax(teacher)
    wanted = (((own - np.log(p / (1 - p))) ** 2).sum(axis=1) / 2).mean()
    return float(wanted), measure(torch.tensor(own), torch.tensor(teacher))


def representation(measure: Measure) -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 7: half the squared distance of gelu(W z + b) from the
    teacher's state. The student's side is its input before the gelu."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = (((gelu(own) - teacher) ** 2).sum(axis=1) / 2).mean()
    return float(wanted), measure(torch.tensor(own), torch.tensor(teacher))


def representation_kl(measure: Measure) -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2020, eq. 5 and 6. The softmax over states and the direction of the
    divergence are this project's choice."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = kullback_leibler(softmax(teacher), softmax(gelu(own)))
    return wanted, measure(torch.tensor(own), torch.tensor(teacher))


def hard_targets(measure: Measure) -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, section 4.1, Hard Predictions: the teacher's argmax as label."""
    own, teacher = drawn(G, C), drawn(G, C)
    wanted = -np.log(softmax(own)[np.arange(G), teacher.argmax(axis=1)]).mean()
    return float(wanted), measure(torch.tensor(own), torch.tensor(teacher))


EQUATIONS: dict[str, Callable[[Measure], tuple[float, Tensor]]] = {
    "mlm": masked_lm,
    "kl-shared": shared_kl,
    "hidden-raw-sum": squared_states,
    "cosine": cosines,
    "attention": attention_maps,
    "ce": gold_labels,
    "log-odds-half": log_odds,
    "sentence-gelu-half": representation,
    "hidden-kld": representation_kl,
    "sentence-kld": representation_kl,  # 2020, section 6.6: of the last state
    "hard": hard_targets,
}
NEAREST = {"kl"}  # of the stored pieces and one outcome for all others: test_logits.py


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_loss_is_its_published_equation(name: str) -> None:
    (loss,) = losses_for("one label", [name]) or losses_for(None, [name])
    wanted, found = EQUATIONS[name](loss.function)
    assert wanted > 0 and found.item() == pytest.approx(wanted, rel=2e-6)


def test_every_loss_of_a_recipe_has_its_equation() -> None:
    stages = [
        stage for recipe in all_recipes().values() for stage in recipe.stages or [recipe.options]
    ]
    assert {name for stage in stages for name in stage["loss"]} == EQUATIONS.keys() | NEAREST


PIECES, KEPT = 7, 5
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


def test_tokens_inside_the_teachers_tokens_count_by_all_tokens() -> None:
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
    teacher, student = (log_softmax(chance.normal(0, 2, (KEPT, PIECES))) for _ in range(2))
    p, q = (np.exp(log_softmax(each / temperature)) for each in (teacher, student))
    m = beta * p + (1 - beta) * q
    rows = beta * p * np.log(p / m) + (1 - beta) * q * np.log(q / m)
    own = torch.from_numpy(student.astype(np.float32)).requires_grad_()
    targets = targets_of(teacher, PIECES)
    found = jsd(targets.predictions(own), targets, temperature, beta=beta)
    expected = rows.sum(axis=1).mean() * temperature**2
    assert float(found.detach()) == pytest.approx(float(expected), abs=1e-6)
    found.backward()
    assert own.grad is not None and bool(torch.isfinite(own.grad).all())


def test_jsd_lies_between_the_two_divergences() -> None:
    """JSD divided by B becomes KL for small B, and by 1 - B reverse KL for large B (GKD, section
    2)."""
    teacher, student = (log_softmax(chance.normal(0, 1, (KEPT, PIECES))) for _ in range(2))
    logits = torch.from_numpy(student.astype(np.float32))
    targets, same = targets_of(teacher, 4), targets_of(student, 4)
    own = targets.predictions(logits)
    # Without the term for the rest, which contains none of the next pieces.
    low, high = (float(jsd(own, targets, 1.0, beta=beta)) for beta in (1e-3, 1 - 1e-3))
    assert low / 1e-3 == pytest.approx(float(kl(own, targets, 1.0)), rel=0.01)
    assert high / 1e-3 == pytest.approx(float(reverse_kl(own, targets, 1.0)), rel=0.01)
    assert float(jsd(same.predictions(logits), same, 1.0)) == pytest.approx(0, abs=1e-6)


def test_a_piece_of_the_rest_is_learnt_from_the_text_by_jsd() -> None:
    teacher = log_softmax(chance.normal(0, 1, (KEPT, PIECES)))
    targets = targets_of(teacher, 3)
    rare = torch.from_numpy(np.argsort(-teacher, axis=1)[:, -1].astype(np.int64))
    own = torch.zeros(KEPT, PIECES, requires_grad=True)
    targets = NextTargets(**{**vars(targets), "following": rare})
    jsd(targets.predictions(own), targets, 1.0).backward()
    assert own.grad is not None
    others = [v for v in range(PIECES) if v not in {*targets.ids[0].tolist(), int(rare[0])}]
    assert float(own.grad[0, rare[0]]) < min(float(own.grad[0, v]) for v in others)


def test_alm_is_a_divergence_of_two_outcomes() -> None:
    """The run and anything else, each with the power 1/T (equation 5)."""
    teacher, student = (-chance.exponential(3, KEPT) for _ in range(2))
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
    teacher = log_softmax(chance.normal(0, 1, (KEPT, PIECES)))
    none = torch.full((KEPT,), -torch.inf)
    stored = replace(targets_of(teacher, PIECES), rest=none)
    whole = WholeTargets(
        torch.arange(PIECES).expand(KEPT, PIECES),
        torch.from_numpy(teacher.astype(np.float32)),
        stored.valid,
        none,
        stored.log_partition,
        stored.following,
    )
    logits = torch.from_numpy(chance.normal(0, 1, (KEPT, PIECES + padding)).astype(np.float32))
    for loss in (kl, reverse_kl, jsd):
        found = []
        for targets in (stored, whole):
            own = logits.clone().requires_grad_()
            value = loss(targets.predictions(own), targets, 2.0)
            value.backward()
            assert own.grad is not None
            found += [value.detach(), own.grad]
        torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-6)
