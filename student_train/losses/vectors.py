"""Losses of text vectors: they compare the similarities between the texts of a batch.

Shape letters: B texts, D size of the student's vectors, W size of the teacher's. Each is zero, with
a gradient, if a batch has fewer than two texts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SHARPNESS = 20.0  # 1 / temperature of the cosines, as sentence-transformers scales them


def cosines(vectors: Tensor) -> Tensor:
    """Compute the cosines [B,B] between vectors [B,D]."""
    # Autocast would multiply in bfloat16: near convergence up to half of a gradient was rounding.
    with torch.autocast(vectors.device.type, enabled=False):
        unit = functional.normalize(vectors.float(), dim=1)
        return unit @ unit.T


def similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error between the cosines of the student's text vectors [B,D] and those
    of the teacher's [B,W], mean over the B * (B - 1) pairs of texts.

    Similarity-preserving distillation, Tung & Mori 2019, here with cosines; relational
    distillation, Park et al. 2019.
    """
    if len(student) < 2:
        return student.sum() * 0.0
    count = len(student) * (len(student) - 1)  # a text's cosine with itself is 1 on both sides
    return (cosines(student) - cosines(teacher)).square().sum() / count


def similarity_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(softmax teacher || softmax student) in nats, mean over the B texts.

    The softmax of a text is over 20 x its cosines with the other texts of the batch. Fang et al.
    2021 (SEED), eq. 3, with the batch instead of a queue.
    """
    if len(student) < 2:
        return student.sum() * 0.0
    itself = torch.eye(len(student), dtype=torch.bool, device=student.device)
    log_q, log_p = (
        # Not -inf: `kl_div` subtracts the two sides, and -inf - -inf is NaN, also times 0.
        functional.log_softmax((SHARPNESS * cosines(side)).masked_fill(itself, -1e4), dim=1)
        for side in (student, teacher)
    )
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
