"""Losses of next-token predictions, and the teacher's targets for them.

Shape letters: M tokens, G positions at which a token starts on both sides, K stored logits, V
student vocabulary. All losses are in nats. Each is zero, with a gradient, if there is nothing to
compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from teachonce.store import LogitsSpec
from teachonce.student_train.losses.logits import (
    LogitTargets,
    divergence,
    outcomes,
    teacher_outcomes,
)
from teachonce.student_train.losses.loss import zero_if_empty

SURE = 1e-9  # distance of a log-probability from 0 at which a run counts as certain
LEAST = -20.0  # log-probability of an outcome the teacher excludes: the divergence stays finite


@dataclass(frozen=True)
class NextTargets(LogitTargets):
    """Holds the teacher's distribution over the student's next piece, and that next piece."""

    following: Tensor  # int64 [G]

    def whole(self) -> NextTargets:
        """Return self; `HeadTargets.whole` computes the targets."""
        return self

    def predictions(self, logits: Tensor) -> Predictions:
        """Compute the student's log-probabilities from its logits [G,V]."""
        return Predictions(*outcomes(logits, self, self.following))

    def of_teacher(self, student: Predictions) -> Tensor:
        """Return the teacher's log-probabilities [G,K+1] of the outcomes in `student`."""
        return teacher_outcomes(self, student.outcomes)

    def tail(self, student: Predictions) -> Tensor:
        """Return the mean over G of -log(q(piece) / q(rest)) for the next piece, where q is the
        student's probability. A row counts as zero if its next piece is stored or the teacher has
        no rest."""
        stored = ((self.ids == self.following[:, None]) & self.valid).any(dim=1)
        # Random draws have no rest: they already estimate the whole cross-entropy, and the tail
        # would count a part of it twice.
        stored |= torch.isneginf(self.rest)
        return torch.where(stored, 0.0, student.outcomes[:, -1] - student.following).mean()


class WholeTargets(NextTargets):
    """Holds the distribution over all V pieces in their order. There is no rest, so the outcomes
    are [G,V] instead of [G,K+1].

    If your own model has more outputs than pieces, as padding, their probability is the rest.
    """

    def predictions(self, logits: Tensor) -> Predictions:
        if logits.shape[1] != self.logprobs.shape[1]:
            return super().predictions(logits)
        logprobs = functional.log_softmax(logits.float(), dim=1)
        return Predictions(logprobs, logprobs.gather(1, self.following[:, None])[:, 0])

    def of_teacher(self, student: Predictions) -> Tensor:
        """Return the teacher's log-probabilities of the outcomes in `student`: [G,V] if the student
        has no padding outputs."""
        if student.outcomes.shape[1] != self.logprobs.shape[1]:
            return super().of_teacher(student)
        return self.logprobs

    def tail(self, student: Predictions) -> Tensor:
        return student.following.new_zeros(())


class TeacherHead:
    """Holds weight [V,D] and bias [V] of a teacher's head, and copies them to a device once.

    spec: has the soft cap of the logits, which `logits` applies.
    """

    def __init__(self, weight: Tensor, bias: Tensor, spec: LogitsSpec | None = None) -> None:
        self._weight, self._bias, self._spec = weight, bias, spec

    def logits(self, values: Tensor) -> Tensor:
        """Return the logits [G,V] of inputs [G,D], on their device."""
        if self._weight.device != values.device:
            self._weight, self._bias = (x.to(values.device) for x in (self._weight, self._bias))
        # Not in bfloat16, as autocast would: log-probabilities were off by up to 0.05 nats.
        with torch.autocast(values.device.type, enabled=False):
            outputs = torch.addmm(self._bias, values.float(), self._weight.T)
        logits: Tensor = self._spec.capped(outputs, torch) if self._spec else outputs
        return logits


@dataclass(frozen=True)
class HeadTargets:
    """Holds the inputs of the teacher's head at G positions, for a student that has the teacher's
    vocabulary. The targets of all V pieces are computed from them exactly.

    head: None in a batch on its way from another process (`StudentBatch.with_head`).
    """

    values: Tensor  # float32 [G,D]
    log_partition: Tensor  # float32 [G]
    following: Tensor  # int64 [G]
    head: TeacherHead | None

    def whole(self) -> WholeTargets:
        """Return the distributions over all pieces. They have G V numbers, so call it for a slice
        of positions."""
        assert self.head is not None
        logprobs = self.head.logits(self.values) - self.log_partition[:, None]
        # Expanded views: ids [G,V] of int64 would take twice the memory of the logits.
        ids = torch.arange(logprobs.shape[1], device=logprobs.device).expand_as(logprobs)
        valid = torch.ones(1, 1, dtype=torch.bool, device=logprobs.device).expand_as(logprobs)
        rest = torch.full_like(self.log_partition, -torch.inf)
        return WholeTargets(ids, logprobs, valid, rest, self.log_partition, self.following)


@dataclass(frozen=True)
class ChunkTargets:
    """Holds G runs of the student's tokens that cover the same bytes as runs of the teacher's.

    Run g has the tokens `following[begin[g]:begin[g + 1]]`.
    """

    before: Tensor  # int64 [J] flat positions that predict the tokens of the runs
    following: Tensor  # int64 [J] these tokens
    begin: Tensor  # int64 [G]
    logprobs: Tensor  # float32 [G] the teacher's log-probability of each run


@dataclass(frozen=True)
class Predictions:
    """Holds the student's log-probabilities at G positions at which the teacher has a distribution.

    outcomes: the log-probabilities, float32 [G,K+1], of the K stored pieces and, in the last
        column, of all other pieces; -inf there if no other piece exists.
    following: the log-probability, float32 [G], of the next piece.
    """

    outcomes: Tensor
    following: Tensor


def next_logprobs(logits: Tensor, following: Tensor) -> Tensor:
    """Compute the log-probabilities [M] of the next pieces `following`, int64 [M], from logits
    [M,V]."""
    return -functional.cross_entropy(logits.float(), following, reduction="none")


@zero_if_empty
def next_token(student: Tensor) -> Tensor:
    """Compute the cross-entropy from the student's log-probabilities of the next tokens [M], mean
    over M."""
    return -student.mean()


@zero_if_empty
def next_inside(student: Tensor, inside: Tensor) -> Tensor:
    """Compute the cross-entropy of the next tokens that begin inside a token of the teacher: their
    sum, divided by the number M of all next tokens.

    student: the student's log-probabilities of all next tokens [M]. inside: bool [M], which of them
        begin inside a token of the teacher.

    The teacher has no distribution inside its tokens, because it predicts each of them as a whole.
    A token inside has the weight 1/M in this loss, any other token 1/G in `kl`. If both losses have
    equal weights, every token counts about the same. With the teacher's vocabulary this loss is 0.
    """
    return (-student).masked_fill(~inside, 0.0).mean()  # 0 without such tokens, not -0


@zero_if_empty
def kl(student: Predictions, targets: NextTargets, temperature: float) -> Tensor:
    """Compute T^2 KL(teacher || student) over the stored pieces and the rest, as `logits.kl` does;
    mean over G. If the next piece is not stored, add the cross-entropy inside the rest.

    A store does not have the probabilities of single pieces in the rest, but the text has samples.
    If a piece of the rest comes next, -log(q(piece) / q(rest)) estimates the teacher's
    cross-entropy inside the rest, without bias if the text is drawn from the teacher. Without this
    term, the student would learn nothing about which rare piece comes next.
    """
    teacher = targets.of_teacher(student)
    return divergence(teacher, student.outcomes, temperature) + targets.tail(student)


@zero_if_empty
def reverse_kl(student: Predictions, targets: NextTargets, temperature: float) -> Tensor:
    """Compute T^2 KL(student || teacher) over the same outcomes as `kl`, with the same term for the
    rest; mean over G.

    Gu et al. 2024, https://arxiv.org/abs/2306.08543, equation 1, on the teacher's text.
    """
    teacher = targets.of_teacher(student)
    log_p = functional.log_softmax(teacher / temperature, dim=1).clamp(min=LEAST)
    present, log_q = _of_present(student.outcomes, temperature)
    terms = torch.where(present, log_q.exp() * (log_q - log_p), 0.0)
    return terms.sum(dim=1).mean() * temperature**2 + targets.tail(student)


@zero_if_empty
def jsd(
    student: Predictions, targets: NextTargets, temperature: float, beta: float = 0.5
) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence T^2 (B KL(P || M) + (1 - B) KL(Q || M)),
    mean over G.

    M = B P + (1 - B) Q, where B is `beta`, P is the teacher's and Q the student's distribution over
    the outcomes of `kl`, with the same term for the rest. Agarwal et al. 2024 (GKD),
    https://arxiv.org/abs/2306.13649, section 2.
    """
    teacher = targets.of_teacher(student)
    log_p = functional.log_softmax(teacher / temperature, dim=1)
    present, log_q = _of_present(student.outcomes, temperature)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    p, q = log_p.exp(), log_q.exp()
    to_teacher = torch.where(p > 0, p * (log_p - log_m), 0.0)
    to_student = torch.where(present, q * (log_q - log_m), 0.0)
    both = beta * to_teacher.sum(dim=1) + (1 - beta) * to_student.sum(dim=1)
    return both.mean() * temperature**2 + targets.tail(student)


@zero_if_empty
def alm(student: Tensor, teacher: Tensor, flatness: float = 100.0) -> Tensor:
    """Compute T KL between Bernoulli variables of p^(1/T) and q^(1/T), mean over G; T is
    `flatness`.

    p and q are the teacher's and the student's likelihoods of runs of the text, given as
    log-probabilities, float [G]. Minixhofer et al. 2025 (ALM), https://arxiv.org/abs/2503.20083,
    equation 5, with T = 100 as there.

    The factor T makes the gradient nearly independent of T: for large T the value is a log(a / b) -
    a + b with a = -log p and b = -log q.
    """
    # A run of probability 1 would divide by 1 - q = 0.
    log_p, log_q = ((side.double() / flatness).clamp(max=-SURE) for side in (teacher, student))
    p, other_p = log_p.exp(), -torch.expm1(log_p)
    happens = torch.where(p > 0, p * (log_p - log_q), 0.0)
    other = other_p * (other_p.log() - torch.log(-torch.expm1(log_q)))
    return (flatness * (happens + other).mean()).to(student.dtype)


def _of_present(student: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return which outcomes have a probability above 0, and the log-probabilities at a
    temperature."""
    present = torch.isfinite(student)
    # Where an outcome is in neither distribution, -inf would make the gradient NaN.
    student = student.masked_fill(~present, -1e30)
    return present, functional.log_softmax(student / temperature, dim=1)
