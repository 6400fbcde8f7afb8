"""Losses of one vector a text: how like the texts of a batch are to one another, for the student
and for the teacher.

Shape letters: B texts, D width of the student's vectors, W of the teacher's. Each is zero, with a
gradient, where a batch has fewer than two texts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SHARPNESS = 20.0  # 1 / temperature of the cosines, as sentence-transformers scales them


def cosines(vectors: Tensor) -> Tensor:
    """Compute the cosine [B,B] of each of the vectors [B,D] with each."""
    own = functional.normalize(vectors.float(), dim=1)
    return own @ own.T


def similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of the cosines between the texts of a batch, student's [B,D] against teacher's
    [B,W], mean over the B * (B - 1) pairs.

    (Similarity-preserving distillation: Tung & Mori 2019, here of cosines; relational
    distillation, Park et al. 2019.)
    """
    if len(student) < 2:
        return student.sum() * 0.0
    count = len(student) * (len(student) - 1)  # a text's cosine with itself is 1 on both sides
    return (cosines(student) - cosines(teacher)).square().sum() / count


def similarity_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax teacher || softmax student) in nats over the other texts of the batch, by the
    cosines with each text times 20, mean over the B texts.

    (SEED: Fang et al. 2021, eq. 3, with the batch for its queue.)
    """
    if len(student) < 2:
        return student.sum() * 0.0
    itself = torch.eye(len(student), dtype=torch.bool, device=student.device)
    log_q, log_p = (
        functional.log_softmax((SHARPNESS * cosines(side)).masked_fill(itself, -1e4), dim=1)
        for side in (student, teacher)
    )
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
