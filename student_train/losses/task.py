"""Losses of logits over the classes of a task, against the teacher's logits or gold labels.

Shape letters: G texts of a classification, or tagged tokens; C classes or tags. Each is zero, with
a gradient, if there is nothing to compare. Formulas with `labels` in their name are for multi-label
teachers: the probability of each label is the sigmoid of its logit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from teachonce.student_train.losses.loss import zero_if_empty

NO_LABEL = -1
LEAST = 1e-6  # probabilities are clipped to LEAST and 1 - LEAST: the log-odds of 0 are infinite


def ce(logits: Tensor, gold: Tensor) -> Tensor:
    """Compute the cross-entropy in nats of logits [G,C] against gold labels int64 [G], mean over
    the labels that are not -1."""
    labelled = gold != NO_LABEL
    if not labelled.any():
        return logits.sum() * 0.0
    return functional.cross_entropy(logits.float()[labelled], gold[labelled])


@zero_if_empty
def kl(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute T^2 KL(teacher || student) in nats of logits [G,C], mean over G.

    Hinton et al. 2015, eq. 1-4.
    """
    log_q = functional.log_softmax(logits.float() / temperature, dim=1)
    log_p = functional.log_softmax(teacher / temperature, dim=1)
    divergence = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return divergence * temperature**2


@zero_if_empty
def logit(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared difference of logits [G,C], mean over G and C.

    Mukherjee & Awadallah 2020, section 3.2.
    """
    return functional.mse_loss(logits.float(), teacher)


@zero_if_empty
def log_odds(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared difference of student logits [G,C] and log(p / (1 - p)) of the teacher's
    class probabilities, mean over G and C.

    Mukherjee & Awadallah 2019, section 3.2.
    """
    probability = teacher.softmax(dim=1)
    return functional.mse_loss(logits.float(), torch.logit(probability, eps=LEAST))


def half_log_odds(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute half the squared distance between the student's scores [G,C] and log(p / (1 - p)) of
    the teacher's class probabilities p, mean over G.

    Mukherjee & Awadallah 2019, eq. 5, per text; 2020, eq. 4, per token.
    """
    return log_odds(logits, teacher) * (teacher.shape[1] / 2)


@zero_if_empty
def hard(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the cross-entropy in nats of logits [G,C] against the teacher's best class, mean over
    G."""
    return functional.cross_entropy(logits.float(), teacher.argmax(dim=1))


@zero_if_empty
def kl_labels(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute T^2 KL(teacher || student) in nats of each label's probability, the sigmoid of logits
    [G,C] / T, mean over G and C."""
    student, target = logits.float() / temperature, teacher / temperature
    log_sigmoid = functional.logsigmoid
    yes = target.sigmoid() * (log_sigmoid(target) - log_sigmoid(student))
    no = (-target).sigmoid() * (log_sigmoid(-target) - log_sigmoid(-student))
    return (yes + no).mean() * temperature**2


@zero_if_empty
def hard_labels(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the binary cross-entropy in nats of logits [G,C] against the teacher's labels with
    probability above 1/2, mean over G and C."""
    return functional.binary_cross_entropy_with_logits(logits.float(), (teacher > 0).float())


@zero_if_empty
def log_odds_labels(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared difference of student logits [G,C] and log(p / (1 - p)) of the teacher's
    probability of each label, mean over G and C."""
    return functional.mse_loss(logits.float(), torch.logit(teacher.sigmoid(), eps=LEAST))


def half_log_odds_labels(logits: Tensor, teacher: Tensor) -> Tensor:
    """Compute `log_odds_labels` with half the sum over C in place of the mean over C."""
    return log_odds_labels(logits, teacher) * (teacher.shape[1] / 2)


def margin(scores: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error of score differences, mean over the G * (G - 1) pairs of inputs in
    the batch and over C.

    `scores` and `teacher` are [G,C]. A constant offset of all scores does not change the loss.
    Margin-MSE: Hofstätter et al. 2020, eq. 1, where a pair is a relevant and a non-relevant passage
    of one query.
    """
    if len(scores) < 2:
        return scores.sum() * 0.0
    # The mean of (d_i - d_j)^2 over i and j is twice the variance of d.
    return 2 * (scores.float() - teacher).var(dim=0).mean()
