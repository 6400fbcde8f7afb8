"""Losses of attention maps. Shape letters: B batch, G aligned runs."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def attention(student: Tensor, teacher: Tensor, pairs: Tensor) -> Tensor:
    """Compute the squared error of attention probabilities between runs [B,G,G], mean over the
    entries where `pairs` (bool [B,G,G]) is true. Zero, with a gradient, if no entry is true.

    Kolesnikova et al. 2022 compare probabilities; TinyBERT compares scores.
    """
    if not pairs.any():
        return student.sum() * 0.0
    return functional.mse_loss(student.float()[pairs], teacher[pairs])
