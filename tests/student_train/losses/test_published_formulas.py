"""Each loss with a source equals its published equation, written in NumPy from the source alone.

Shape letters: G runs or texts, D teacher hidden size, V pieces, C classes. Sums over a data set
become means over G, as a training draws its batches from the data set; everything else follows the
equation.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from teachonce.student_train.losses import logits, maps, states
from teachonce.student_train.losses.logits import SharedTargets
from teachonce.student_train.losses.registry import losses_for
from teachonce.support.arrays import Floats

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


def measure(name: str) -> Callable[..., Tensor]:
    """Return the formula of the named loss for a student that classifies."""
    (loss,) = losses_for("one label", [name])
    return loss.measure


def masked_lm() -> tuple[float, Tensor]:
    """Kolesnikova, eq. 1; Zhao, eq. 2: minus the log-probability of the masked token."""
    scores, gold = drawn(G, V), RANDOM.integers(V, size=G)
    wanted = -np.log(softmax(scores)[np.arange(G), gold]).mean()
    return float(wanted), logits.mlm(torch.tensor(scores), torch.tensor(gold))


def shared_kl() -> tuple[float, Tensor]:
    """Kolesnikova, eq. 2 and footnote 3, 4 and 8: KL over the matching pieces of both sides (the
    thesis, 3.19: over all pieces); T squared as in Hinton et al. 2015, section 2."""
    own, teacher, shared = drawn(G, V), drawn(G, V), np.array([2, 3, 5, 7, 11, 13])
    p, q = (softmax(each[:, shared] / TEMPERATURE) for each in (teacher, own))
    targets = SharedTargets(
        torch.tensor(shared).expand(G, -1), torch.tensor(teacher[:, shared]),
        torch.ones(G, len(shared), dtype=torch.bool),
    )  # fmt: skip
    found = logits.kl_shared(torch.tensor(own), targets, TEMPERATURE)
    return kullback_leibler(p, q) * TEMPERATURE**2, found


def squared_states() -> tuple[float, Tensor]:
    """Kolesnikova, B.2, 4, the sum over the channels of a token."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = ((own.astype(np.float64) - teacher) ** 2).sum(axis=1).mean()
    return float(wanted), states.hidden_sum(torch.tensor(own), torch.tensor(teacher))


def cosines() -> tuple[float, Tensor]:
    """Kolesnikova, eq. 3; the thesis's cosine embedding loss."""
    own, teacher = drawn(G, D), drawn(G, D)
    lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(teacher, axis=1)
    wanted = (1 - (own * teacher).sum(axis=1) / lengths).mean()
    return float(wanted), states.cosine(torch.tensor(own), torch.tensor(teacher))


def attention_maps() -> tuple[float, Tensor]:
    """Kolesnikova, 4.1: squared error of averaged maps, the mean over their cells."""
    own, teacher = softmax(drawn(2, G, G)), softmax(drawn(2, G, G))
    present = torch.ones(2, G, G, dtype=torch.bool)
    one, other = (torch.tensor(each, dtype=torch.float32) for each in (own, teacher))
    return float(((own - teacher) ** 2).mean()), maps.attention(one, other, present)


def gold_labels() -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 3, whose sign the paper omits; 2020, eq. 2."""
    scores, gold = drawn(G, C), RANDOM.integers(C, size=G)
    wanted = -np.log(softmax(scores)[np.arange(G), gold]).mean()
    return float(wanted), measure("ce")(torch.tensor(scores), torch.tensor(gold))


def log_odds() -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 5, and section 4.1: logit(p) = log(p / (1 - p)); 2020, eq.
    4."""
    own, teacher = drawn(G, C), drawn(G, C)
    p = softmax(teacher)
    wanted = (((own - np.log(p / (1 - p))) ** 2).sum(axis=1) / 2).mean()
    return float(wanted), measure("log-odds-half")(torch.tensor(own), torch.tensor(teacher))


def representation() -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, eq. 7: half the squared distance of gelu(W z + b) from the
    teacher's state. The student's side is its input before the gelu."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = (((gelu(own) - teacher) ** 2).sum(axis=1) / 2).mean()
    return float(wanted), measure("sentence-gelu-half")(torch.tensor(own), torch.tensor(teacher))


def representation_kl() -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2020, eq. 5 and 6. The softmax over states and the direction of the
    divergence are this project's choice."""
    own, teacher = drawn(G, D), drawn(G, D)
    wanted = kullback_leibler(softmax(teacher), softmax(gelu(own)))
    return wanted, measure("hidden-kld")(torch.tensor(own), torch.tensor(teacher))


def hard_targets() -> tuple[float, Tensor]:
    """Mukherjee & Awadallah 2019, section 4.1, Hard Predictions: the teacher's argmax as label."""
    own, teacher = drawn(G, C), drawn(G, C)
    wanted = -np.log(softmax(own)[np.arange(G), teacher.argmax(axis=1)]).mean()
    return float(wanted), measure("hard")(torch.tensor(own), torch.tensor(teacher))


@pytest.mark.parametrize(
    "equation",
    [
        masked_lm, shared_kl, squared_states, cosines, attention_maps, gold_labels,
        log_odds, representation, representation_kl, hard_targets,
    ],
    ids=lambda equation: equation.__name__,
)  # fmt: skip
def test_a_loss_is_its_published_equation(equation: Callable[[], tuple[float, Tensor]]) -> None:
    wanted, found = equation()
    assert wanted > 0 and found.item() == pytest.approx(wanted, rel=2e-6)
