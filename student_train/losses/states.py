"""Losses of hidden states: a student's, projected to the teacher's width, against the teacher's.

Shape letters: G aligned runs, or texts where the state of a whole text is compared; D teacher
width. Each is zero, with a gradient, where G is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CONTRASTED = 512  # most runs of a batch: the number of scores is its square
SHARPNESS = 20.0  # 1 / temperature of the cosines


def hidden(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of projected student states [G,D] against the teacher's, mean over G and D.

    As `hidden`, `teacher` is normalised per channel with the store's calibration, so that a few
    loud channels do not make the whole loss. As `hidden-raw` it is as the teacher gave it
    (Kolesnikova et al. 2022, appendix B.2: MSE of averaged states).
    """
    if len(student) == 0:
        return student.sum() * 0.0
    return functional.mse_loss(student.float(), teacher)


def hidden_sum(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error as of `hidden`, but summed over D and averaged over G: D times as large.

    (Appendix B.2 of Kolesnikova et al. 2022 does not tell the reduction. Their published code
    divides the sum over all by the number of aligned tokens, and their weight, 0.1, belongs to
    that.)
    """
    return hidden(student, teacher) * teacher.shape[1]


def hidden_gelu(student: Tensor, teacher: Tensor) -> Tensor:
    """`hidden` of GELU(student): the squared error of GELU(W z + b), mean over G and D.

    For the state of a whole text this is the representation loss of Mukherjee & Awadallah 2019,
    eq. 7, up to its factor: they take half the sum over D. `teacher` is normalised per channel, and
    theirs is not. For tokens it takes the projection of Mukherjee & Awadallah 2020, eq. 5.
    """
    return hidden(functional.gelu(student.float()), teacher)


def half_gelu(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the squared distance of GELU(W z + b) [G,D] and the teacher's raw states, mean over G.

    (Mukherjee & Awadallah 2019, eq. 7, a text's part of it.)
    """
    return hidden_gelu(student, teacher) * (teacher.shape[1] / 2)


def hidden_kld(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax teacher || softmax GELU(student)) in nats over the channels of projected student
    states [G,D] and the teacher's, mean over G.

    (Mukherjee & Awadallah 2020, section 3.2: the projection ends in a GELU, and the divergence does
    not depend on the scale.) `teacher` is normalised per channel, as for `hidden`: else a few loud
    channels would be the whole distribution.
    """
    if len(student) == 0:
        return student.sum() * 0.0
    log_q = functional.log_softmax(functional.gelu(student.float()), dim=1)
    log_p = functional.log_softmax(teacher, dim=1)
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cosine of projected student states [G,D] and the teacher's raw states, mean over G.

    (DistilBERT: Sanh et al. 2019, section 3.) Raw, as a norm per channel would turn the angles.
    """
    if len(student) == 0:
        return student.sum() * 0.0
    return (1 - functional.cosine_similarity(student.float(), teacher, dim=1)).mean()


def contrastive(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy in nats of telling each projected student state's own teacher state from those
    of the batch's other runs, by the cosine; raw states [G,D], mean over the first 512 of G.

    (InfoNCE: van den Oord et al. 2018, eq. 4; for distillation Tian et al. 2020.)
    """
    if len(student) == 0:
        return student.sum() * 0.0
    own = functional.normalize(student[:CONTRASTED].float(), dim=1)
    others = functional.normalize(teacher[:CONTRASTED], dim=1)
    return functional.cross_entropy(
        SHARPNESS * own @ others.T, torch.arange(len(own), device=own.device)
    )
