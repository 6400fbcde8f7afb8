"""Losses of logits over a vocabulary, and their targets.

Shape letters: M masked tokens, G aligned runs, K stored logits, V student vocabulary. All losses
except `logit` are in nats. Each is zero, with a gradient, if there is nothing to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from teachonce.student_train.losses.loss import zero_if_empty


@dataclass(frozen=True)
class LogitTargets:
    """Holds the teacher's distribution over student pieces, for each of G aligned runs.

    Slots where `valid` is false are padding: an arbitrary id, with log-probability -inf.
    """

    ids: Tensor  # int64 [G,K] student pieces, each at most once among the valid ones of a row
    logprobs: Tensor  # float32 [G,K]
    valid: Tensor  # bool [G,K]
    rest: Tensor  # float32 [G] log of the probability of everything else
    log_partition: Tensor  # float32 [G] of the teacher's logits


@dataclass(frozen=True)
class SharedTargets:
    """Holds the teacher's logits of shared pieces, up to a constant in each row, for each of G
    aligned runs. The S pieces are all shared pieces, or those that the store has.

    Slots where `valid` is false are padding with an arbitrary id.
    """

    ids: Tensor  # int64 [G,S] student pieces, each at most once among the valid ones of a row
    logits: Tensor  # float32 [G,S]
    valid: Tensor  # bool [G,S]


@zero_if_empty
def mlm(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of logits [M,V] against labels int64 [M], mean over M.

    Devlin et al. 2019 (BERT), section 3.1.
    """
    return functional.cross_entropy(logits.float(), labels)


@zero_if_empty
def kl(logits: Tensor, targets: LogitTargets, temperature: float) -> Tensor:
    """Compute T^2 KL(teacher || student) of logits [G,V] against stored log-probabilities [G,K] and
    their rest [G], mean over G.

    Both sides are distributions over the same outcomes: the stored pieces, and one outcome for all
    other pieces (the "ghost token" of sparse distillation). Nothing is renormalised, with one
    exception: if the stored pieces of a row are the student's whole vocabulary, there are no other
    pieces, and both sides are distributions over the stored ones. Hinton et al. 2015, eq. 1-4.
    """
    # The temperature is applied to these outcomes, p^(1/T): the single logits of the rest, to which
    # the paper applies it, are not stored.
    student, _ = outcomes(logits, targets)
    return divergence(teacher_outcomes(targets, student), student, temperature)


@zero_if_empty
def kl_shared(logits: Tensor, targets: SharedTargets, temperature: float) -> Tensor:
    """Compute T^2 KL(teacher || student) of the softmax over shared pieces alone, mean over G.

    `logits` are [G,V]; other pieces are left out on both sides. Kolesnikova et al. 2022, eq. 4 and
    8, where both outputs are restricted to V_match. If a store has only K logits of a token, the
    shared pieces among them approximate V_match.
    """
    student = logits.float().gather(1, targets.ids).masked_fill(~targets.valid, -torch.inf)
    teacher = targets.logits.masked_fill(~targets.valid, -torch.inf)
    return divergence(teacher, student, temperature)


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Compute T^2 KL in nats of the softmax of logits [G,K] at temperature T, mean over G."""
    log_p = functional.log_softmax(teacher / temperature, dim=1)
    log_q = functional.log_softmax(student / temperature, dim=1)
    p = log_p.exp()
    # Outcomes of probability zero add nothing; -inf - -inf must not become NaN.
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))
    return terms.sum(dim=1).mean() * temperature**2


def outcomes(
    logits: Tensor, targets: LogitTargets, following: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute two tensors of the student's log-probabilities from its logits [G,V]: [G,K+1], of the
    K stored pieces and of all other pieces together; and [G], of the piece `following` [G] of each
    row (default: piece 0).

    The last column is -inf in rows whose stored pieces are the whole vocabulary.
    """
    if following is None:
        following = targets.ids.new_zeros(len(logits))
    logprobs: tuple[Tensor, Tensor] = _Outcomes.apply(  # type: ignore[no-untyped-call]
        logits, targets.ids, targets.valid, following
    )
    return logprobs


def teacher_outcomes(targets: LogitTargets, student: Tensor) -> Tensor:
    """Return the teacher's log-probabilities [G,K+1] of the outcomes of `outcomes`: the K stored
    pieces, then all other pieces.

    student: the student's log-probabilities [G,K+1]. Where their last column is -inf, there are no
        other pieces, so the teacher's last column is -inf, too.
    """
    rest = targets.rest.masked_fill(student[:, -1].isneginf(), -torch.inf)
    return torch.cat([targets.logprobs, rest[:, None]], dim=1)


class _Outcomes(torch.autograd.Function):
    """Computes `outcomes`.

    Autograd would store several tensors [G,V] and take three times as long. The derivative here
    needs only one: the probabilities of the pieces in the rest, up to a factor.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, valid: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        all_stored = valid.sum(dim=1) == logits.shape[1]
        # Not log(1 - sum of the stored): where the rest is small, that difference has no digits
        # left.
        unstored = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        unstored.scatter_(1, ids, -torch.inf)
        most = unstored.amax(dim=1, keepdim=True).clamp(min=torch.finfo(unstored.dtype).min)
        unstored = unstored.sub_(most).exp_()
        mass = unstored.sum(dim=1, keepdim=True)
        rest = (mass.log() + most).masked_fill_(all_stored[:, None], -torch.inf)
        stored = logits.gather(1, ids).to(unstored.dtype).masked_fill_(~valid, -torch.inf)
        logprobs = torch.cat([stored, rest], dim=1)
        log_partition = logprobs.logsumexp(dim=1, keepdim=True)
        logprobs -= log_partition
        ctx.save_for_backward(unstored, mass, ids, valid, all_stored, logprobs, following)
        return logprobs, (logits.gather(1, following[:, None]) - log_partition)[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_following: Tensor) -> tuple[Tensor, None, None, None]:
        unstored, mass, ids, valid, all_stored, logprobs, following = ctx.saved_tensors
        present = torch.cat([valid, ~all_stored[:, None]], dim=1)
        grad = grad.masked_fill(~present, 0.0)
        # All log-probabilities have -log_partition, whose derivative is the softmax.
        grad = grad - (grad.sum(dim=1) + of_following)[:, None] * logprobs.exp()
        of_logits = unstored * (grad[:, -1:] / mass.clamp(min=torch.finfo(mass.dtype).tiny))
        of_logits.scatter_add_(1, ids, grad[:, :-1])
        return (
            of_logits.scatter_add_(1, following[:, None], of_following[:, None]),
            None,
            None,
            None,
        )


def logit(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Compute the squared difference of the logits of the student [G,V] and of the teacher, mean
    over all stored shared pieces.

    The teacher's logit is log-probability + log-partition. Ba & Caruana 2014, eq. 1.
    """
    if not targets.valid.any():
        return logits.sum() * 0.0
    teacher = targets.logprobs + targets.log_partition[:, None]
    return functional.mse_loss(
        logits.float().gather(1, targets.ids)[targets.valid], teacher[targets.valid]
    )


def hard(logits: Tensor, targets: LogitTargets) -> Tensor:
    """Compute the cross-entropy of logits [G,V] against the teacher's best shared piece, mean over
    the runs that have one."""
    best = targets.logprobs.masked_fill(~targets.valid, -torch.inf).argmax(dim=1, keepdim=True)
    has_one = targets.valid.any(dim=1)
    if not has_one.any():
        return logits.sum() * 0.0
    return functional.cross_entropy(
        logits.float()[has_one], targets.ids.gather(1, best)[has_one, 0]
    )
