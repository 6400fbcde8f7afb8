"""Losses of text vectors: they compare the similarities between the texts of a batch, or those to
anchors, texts of the store that are the same for every batch.

Shape letters: B texts, D size of the student's vectors, W size of the teacher's, M anchors. A loss
between the texts of a batch is zero, with a gradient, if the batch has fewer than two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SHARPNESS = 20.0  # 1 / temperature of the cosines, as sentence-transformers scales them


def cosines(vectors: Tensor, others: Tensor | None = None) -> Tensor:
    """Compute the cosines [B,M] of vectors [B,D] with others [M,D], by default themselves."""
    # Autocast would multiply in bfloat16: near convergence up to half of a gradient was rounding.
    with torch.autocast(vectors.device.type, enabled=False):
        own = functional.normalize(vectors.float(), dim=1)
        second = own if others is None else functional.normalize(others.float(), dim=1)
        return own @ second.T


def similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared error of the cosines between texts, student's [B,D] against teacher's
    [B,W], mean over the B * (B - 1) pairs.

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


def anchors(student: Tensor, teacher: tuple[Tensor, Tensor], sharpness: float) -> Tensor:
    """Compute KL(softmax teacher || softmax student) in nats, mean over the B texts.

    The softmax of a text is over `sharpness` times its cosines with the M anchors. Without texts
    the loss is 0.

    student: [B,W]. teacher: its vectors [B,W] of the texts, and [M,W] of the anchors, with which
        both sides are compared.

    Abbasi Koohpayegani et al. 2020 (CompRess), with the teacher's anchors for both sides (its
    variant 1q). There the anchors are from the last batches, here they are the same in all.
    """
    if not len(student):
        return student.sum() * 0.0
    of_texts, of_anchors = teacher
    log_q, log_p = (
        functional.log_softmax(sharpness * cosines(side, of_anchors), dim=1)
        for side in (student, of_texts)
    )
    return functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
