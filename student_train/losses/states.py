"""Losses of hidden states: the student's, projected to the teacher's hidden size, are compared with
the teacher's.

Shape letters: G aligned runs, or texts for losses of a text's state; D the teacher's hidden size.
Each is zero, with a gradient, if G is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from teachonce.student_train.losses.loss import zero_if_empty
from teachonce.student_train.losses.vectors import SHARPNESS

CONTRASTED = 512  # largest number of runs: the scores are a square matrix of that size


@zero_if_empty
def hidden(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error of projected student states [G,D] against the teacher's, mean over
    G and D.

    For `hidden`, the teacher's states are normalised per channel with the store's calibration, so
    that a few channels of large variance do not dominate. For `hidden-raw` they are not normalised
    (Kolesnikova et al. 2022, appendix B.2: MSE of averaged states).
    """
    # A student's states are bfloat16 under autocast; errors are squared in float32.
    return functional.mse_loss(student.float(), teacher)


def hidden_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error as in `hidden`, but summed over D and averaged over G."""
    # Kolesnikova et al. 2022, appendix B.2, do not give the reduction. Their published code divides
    # the sum by the number of aligned tokens, and their weight of 0.1 belongs to this reduction.
    return hidden(student, teacher) * teacher.shape[1]


def hidden_gelu(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error of GELU(W z + b) against the teacher's states, mean over G and D.
    `student` holds W z + b, the student's states z after the projection.

    For the state of a text this is Mukherjee & Awadallah 2019, eq. 7, with two differences: they
    take half the sum over D, and do not normalise the teacher's channels. For tokens the projection
    is Mukherjee & Awadallah 2020, eq. 5.
    """
    return hidden(functional.gelu(student.float()), teacher)


def half_gelu(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute half the squared distance of GELU(W z + b) [G,D] and the teacher's raw states, mean
    over G.

    Mukherjee & Awadallah 2019, eq. 7, per text.
    """
    return hidden_gelu(student, teacher) * (teacher.shape[1] / 2)


@zero_if_empty
def hidden_kld(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(softmax teacher || softmax GELU(student)) in nats over the channels of states
    [G,D], mean over G.

    Mukherjee & Awadallah 2020, section 3.2. `student` is the projected state before the GELU.
    `teacher` is normalised per channel, as for `hidden`.
    """
    # Without normalising, a few channels of large variance would have almost all of the softmax.
    log_q = functional.log_softmax(functional.gelu(student.float()), dim=1)
    log_p = functional.log_softmax(teacher, dim=1)
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


@zero_if_empty
def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute 1 - cosine of projected student states [G,D] and the teacher's raw states, mean over
    G.

    Sanh et al. 2019 (DistilBERT), section 3.
    """
    # Raw states: normalising per channel would change the angles.
    return (1 - functional.cosine_similarity(student.float(), teacher, dim=1)).mean()


@zero_if_empty
def contrastive(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute InfoNCE in nats over raw states [G,D], mean over the first 512 of G.

    Each projected student state is classified by cosine: the positive is its own teacher state, the
    negatives are the teacher states of the batch's other runs. van den Oord et al. 2018, eq. 4; for
    distillation Tian et al. 2020.
    """
    with torch.autocast(student.device.type, enabled=False):  # as in `vectors.cosines`
        queries = functional.normalize(student[:CONTRASTED].float(), dim=1)
        keys = functional.normalize(teacher[:CONTRASTED].float(), dim=1)
        return functional.cross_entropy(
            SHARPNESS * queries @ keys.T, torch.arange(len(queries), device=queries.device)
        )
