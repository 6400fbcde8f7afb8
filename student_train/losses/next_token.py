"""Losses of next-token predictions, and the teacher's side of them.

Shape letters: M tokens, G places at which tokens of both sides begin, K stored logits, V student
vocabulary. All losses are in nats. Each is zero, with a gradient, if there is nothing to compare.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from teachonce.student_train.losses.logits import LogitTargets, divergence, mlm, sides

LEAST = -20.0  # log-probability of an outcome the teacher excludes: the divergence stays finite


@dataclass(frozen=True)
class NextTargets(LogitTargets):
    """Holds the teacher's distribution over the student's next piece, and that next piece."""

    following: Tensor  # int64 [G]


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [M,V] against the tokens that follow, int64 [M], mean over M."""
    return mlm(logits, labels)  # the same formula over other tokens


def kl(logits: Tensor, targets: NextTargets, temperature: float) -> Tensor:
    """Return T^2 KL(teacher || student) over the stored pieces and the rest, as `logits.kl`, plus
    the cross-entropy in the rest if the following piece is not stored; mean over G.

    A store has no probabilities of single pieces in the rest. The text has: where a piece of the
    rest follows, -log(q(piece) / q(rest)) is an unbiased estimate of the teacher's cross-entropy
    inside the rest, if the text is drawn from the teacher. Without it nothing would be learnt of
    which rare piece follows.
    """
    if len(logits) == 0:
        return logits.sum() * 0.0
    student, teacher = sides(logits, targets)
    return divergence(teacher, student, temperature) + _tail(logits, targets, student)


def reverse_kl(logits: Tensor, targets: NextTargets, temperature: float) -> Tensor:
    """T^2 KL(student || teacher) over the same outcomes, with the same term for the rest (Gu et al.
    2024, https://arxiv.org/abs/2306.08543, equation 1, on the teacher's text); mean over G."""
    if len(logits) == 0:
        return logits.sum() * 0.0
    student, teacher = sides(logits, targets)
    present = torch.isfinite(student)
    log_p = functional.log_softmax(teacher / temperature, dim=1).clamp(min=LEAST)
    # Where an outcome is in neither, -inf would make the gradient NaN.
    log_q = functional.log_softmax(student.masked_fill(~present, -1e30) / temperature, dim=1)
    terms = torch.where(present, log_q.exp() * (log_q - log_p), 0.0)
    return terms.sum(dim=1).mean() * temperature**2 + _tail(logits, targets, student)


def _tail(logits: Tensor, targets: NextTargets, student: Tensor) -> Tensor:
    """Return the mean over G of -log(q(piece) / q(rest)), zero where the piece is stored, and where
    the teacher has no rest."""
    stored = ((targets.ids == targets.following[:, None]) & targets.valid).any(dim=1)
    # Random draws have no rest: their mean is the whole cross-entropy, which would count twice.
    stored |= torch.isneginf(targets.rest)
    own = functional.log_softmax(logits.float(), dim=1)
    own = own.gather(1, targets.following[:, None])[:, 0]
    return torch.where(stored, 0.0, student[:, -1] - own).mean()
