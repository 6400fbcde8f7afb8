"""Computes a decoder's predictions for all losses of next tokens. The logits of a position are
computed once, and in slices of positions, so that no tensor has a logit for every token and
piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachonce.student_train.data.batch import StudentBatch, pool_members
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.losses.next_token import (
    HeadTargets,
    NextTargets,
    next_logprobs,
)

# Fused losses such as Liger's compute the gradient in the forward pass, with weights that must be
# known before it. In `alm` the weight of a position depends on its whole run, so the other losses
# would need the logits a second time.
MOST_LOGITS = {"cpu": 2**22, "cuda": 2**25}
"""The largest number of logits at once, by type of device: 128 MB in float32 on a GPU, 16 MB on a
CPU. The memory of a larger tensor is mapped again each time, so a CPU would take up to twice the
time."""


class NextTokens:
    """Holds a decoder's predictions of next tokens for one batch, and gives losses their arguments.

    losses: the values of the terms that compare distributions.
    """

    def __init__(
        self,
        head: Callable[[Tensor], Tensor],
        pieces: int,
        states: Tensor,
        batch: StudentBatch,
        terms: Sequence[Term],
    ) -> None:
        """Compute the predictions from flat states [N,D].

        head: returns logits [M,V] of states [M,D]. pieces: V; 0 computes all logits at once.
        """
        self._head, self._states, self._batch = head, states, batch
        # Losses of next tokens share one alignment.
        aligned = [term.alignment for term in terms if term.loss.of_next and term.alignment]
        self._targets = batch.aligned[aligned[0]] if aligned else None
        self.losses = dict[Term, Tensor]()
        sides = {term.loss.student for term in terms}
        following = batch.labels.new_zeros(len(states))
        needed = torch.zeros_like(following, dtype=torch.bool)
        if "next" in sides:
            following[batch.masked] = batch.labels
            needed[batch.masked] = True
        if "chunks" in sides and self._targets and (chunks := self._targets.chunks):
            following[chunks.before] = chunks.following
            needed[chunks.before] = True
        rows, parts = list[Tensor](), list[Tensor]()
        compared = [term for term in terms if term.loss.student == "predictions"]
        if compared and (distribution := self._distribution()):
            at, targets = distribution
            logprobs, losses = _compared(head, pieces, states[at], targets, compared)
            self.losses = dict(zip(compared, losses, strict=True))
            rows, parts = [at], [logprobs]
            needed[at] = False

        def logprobs_of(states: Tensor, following: Tensor) -> Tensor:
            return next_logprobs(head(states), following)

        if sides & {"next", "chunks"}:
            rows.append(needed.nonzero()[:, 0])
            parts += _in_slices(logprobs_of, pieces, states[rows[-1]], following[rows[-1]])
        # [N], in row t the log-probability of the token after flat token t, if a loss reads it.
        self._logprobs = states.new_zeros(0)
        if parts:
            values = torch.cat(parts)
            self._logprobs = values.new_zeros(len(states)).index_copy(0, torch.cat(rows), values)

    def of(self, term: Term) -> list[tuple[Any, ...]]:
        """Return the student's side and the teacher's of a term; [] if the batch has no such
        targets."""
        match term.loss.student:
            case "next":
                values = self._logprobs[self._batch.masked]
                if term.loss.teacher == "nothing":
                    return [(values,)]
                assert self._targets is not None and self._targets.inside is not None
                return [(values, self._targets.inside)]
            case "chunks" if self._targets and (chunks := self._targets.chunks):
                values = self._logprobs[chunks.before]
                return [(pool_members(values[:, None], chunks.begin, "sum")[:, 0], chunks.logprobs)]
            case "predictions" if distribution := self._distribution():
                at, targets = distribution
                whole = targets.whole()
                return [(whole.predictions(self._head(self._states[at])), whole)]
        return []

    def _distribution(self) -> tuple[Tensor, NextTargets | HeadTargets] | None:
        """Return the positions [G] at which the teacher has a distribution, and the targets; None
        if the batch has none."""
        if self._targets is None or self._targets.logit_runs is None:
            return None
        targets = self._targets.predicted
        assert isinstance(targets, NextTargets | HeadTargets)
        return self._targets.logit_runs.member, targets  # a run is the token that predicts


def _compared(
    head: Callable[[Tensor], Tensor],
    pieces: int,
    states: Tensor,
    targets: NextTargets | HeadTargets,
    terms: Sequence[Term],
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [G] of the next pieces, and the values [T] of `terms`, computed
    from states [G,D]."""

    count = max(1, len(states))

    def of_slice(states: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        whole = targets.whole()
        predictions = whole.predictions(head(states))
        values = torch.stack([term.function(*term.arguments(predictions, whole)) for term in terms])
        return predictions.following, values * (len(states) / count)

    logprobs, values = zip(*_in_slices(of_slice, pieces, states, targets), strict=True)
    return torch.cat(logprobs), torch.stack(values).sum(dim=0)


def _in_slices(
    compute: Callable[[Tensor, Any], Any], pieces: int, states: Tensor, targets: Any
) -> list[Any]:
    """Call `compute` for slices of the G positions, and return the results. `states` are [G,D];
    `targets` are a tensor [G] or a dataclass of tensors [G,...]. The backward pass computes the
    logits again, so they are not stored."""
    most = MOST_LOGITS.get(states.device.type, MOST_LOGITS["cuda"])
    if len(states) * pieces <= most:
        return [compute(states, targets)]
    size = max(1, most // pieces)
    # Nothing random is recomputed, so no state of a generator is stored. The reentrant way tracks
    # gradients only if an argument requires one, and the weights of the head are not an argument.
    recomputed = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    slices = (slice(first, first + size) for first in range(0, len(states), size))
    return [recomputed(states[part], _sliced(targets, part)) for part in slices]


def _sliced(targets: Any, part: slice) -> Any:
    if isinstance(targets, Tensor):
        return targets[part]
    fields = vars(targets).items()
    return type(targets)(**{n: v[part] if isinstance(v, Tensor) else v for n, v in fields})
