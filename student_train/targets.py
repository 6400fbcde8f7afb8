"""The teacher's distribution, told in the student's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTargets:
    """What G aligned runs should predict.

    Slots that are not `valid` hold a valid piece's id and -inf.
    """

    ids: Tensor  # int64 [G,K] student pieces, each at most once among the valid ones of a row
    logprobs: Tensor  # float32 [G,K]
    valid: Tensor  # bool [G,K]
    rest: Tensor  # float32 [G] log of the probability of everything else
    log_partition: Tensor  # float32 [G] of the teacher's logits

    def to(self, device: torch.device) -> LogitTargets:
        return LogitTargets(*(value.to(device, non_blocking=True) for value in vars(self).values()))


def fold(
    ids: np.ndarray,
    logprobs: np.ndarray,
    rest: np.ndarray,
    log_partition: np.ndarray,
    vocabulary: np.ndarray,
) -> tuple[LogitTargets, np.ndarray]:
    """Kept teacher logits [G,K] as outcomes over student pieces, and which rows have at least one
    piece [G].

    `vocabulary` [Vt] gives the student piece of each teacher piece, or -1. Mass of teacher pieces
    with the same student piece is added up, mass of those with none goes to the rest: the outcomes
    still sum to one. Rows without any piece are left out of the result.
    """
    mapped = np.where(ids < len(vocabulary), vocabulary[np.minimum(ids, len(vocabulary) - 1)], -1)
    order = np.argsort(mapped, axis=1, kind="stable")
    mapped = np.take_along_axis(mapped, order, axis=1)
    probability = np.exp(np.take_along_axis(logprobs, order, axis=1).astype(np.float64))
    first = np.ones(mapped.shape, bool)
    first[:, 1:] = mapped[:, 1:] != mapped[:, :-1]
    slot = np.cumsum(first, axis=1) - 1
    rows = np.arange(len(mapped))[:, None]
    mass = np.zeros(mapped.shape)
    np.add.at(mass, (rows, slot), probability)
    piece = np.full(mapped.shape, -1)
    piece[np.broadcast_to(rows, slot.shape)[first], slot[first]] = mapped[first]
    unshared = np.where(piece == -1, mass, 0).sum(axis=1)
    valid = (piece >= 0) & (mass > 0)
    with np.errstate(divide="ignore"):
        folded = np.log(np.where(valid, mass, 0)).astype(np.float32)
        left = np.log(np.exp(rest.astype(np.float64)) + unshared).astype(np.float32)
    some = np.asarray(valid.any(axis=1))
    # Invalid slots point at a valid piece of their row: gathers and scatters need no extra column.
    stand_in = np.take_along_axis(piece, valid.argmax(axis=1)[:, None], axis=1)
    piece = np.where(valid, piece, stand_in).astype(np.int64)
    kept = (piece, folded, valid, left, log_partition.astype(np.float32))
    return LogitTargets(*(torch.from_numpy(value[some]) for value in kept)), some
