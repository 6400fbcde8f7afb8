"""What the losses of next tokens read of a decoder. The logits of a position are computed once for
all losses, and in slices of positions, so that no tensor has a logit for every token and piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachonce.student_train.data.batch import StudentBatch, pool_members
from teachonce.student_train.losses.next_token import (
    HeadTargets,
    NextTargets,
    Predictions,
    next_logprobs,
)
from teachonce.student_train.losses.registry import Term

MOST_LOGITS = {"cpu": 2**22, "cuda": 2**25}
"""At once, by type of device: 128 MB in float32 on a GPU, 16 MB on a CPU. The memory of a larger
tensor is mapped anew each time, so a CPU would take up to twice the time."""


class NextTokens:
    """Holds a decoder's predictions of next tokens for one batch, and gives the losses of `SIDES`
    their arguments.

    losses: the values of the terms that compare distributions, by name.
    """

    SIDES = ("next", "predictions", "chunks")

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
        of_teacher = [term for term in terms if term.loss.of_next and term.alignment]
        self._taught = batch.aligned[of_teacher[0].alignment] if of_teacher else None
        self.losses = dict[str, Tensor]()
        following = batch.labels.new_zeros(len(states))
        following[batch.masked] = batch.labels
        asked = torch.zeros_like(following, dtype=torch.bool)
        asked[batch.masked] = True
        if chunks := self._taught and self._taught.chunks:
            following[chunks.before] = chunks.following
            asked[chunks.before] = True
        places, found = list[Tensor](), list[Tensor]()
        compared = [term for term in terms if term.loss.student == "predictions"]
        if compared and (distribution := self._distribution()):
            at, targets = distribution
            values, losses = _compared(head, pieces, states[at], targets, compared)
            self.losses = dict(zip((term.name for term in compared), losses, strict=True))
            places, found = [at], [values]
            asked[at] = False

        def of_text(states: Tensor, following: Tensor) -> Tensor:
            return next_logprobs(head(states), following)

        at = asked.nonzero()[:, 0]
        found += _in_slices(of_text, pieces, states[at], following[at])
        values = torch.cat(found)
        # [N], in row t the log-probability of the token after flat token t, if a loss reads it.
        self._logprobs = values.new_zeros(len(states)).index_copy(
            0, torch.cat([*places, at]), values
        )

    def of(self, term: Term) -> list[tuple[Any, ...]]:
        """Return the student's side and the teacher's of a term; [] if the batch has no such
        targets."""
        match term.loss.student:
            case "next":
                return [(self._logprobs[self._batch.masked],)]
            case "chunks" if self._taught and (chunks := self._taught.chunks):
                own = self._logprobs[chunks.before]
                return [(pool_members(own[:, None], chunks.begin, "sum")[:, 0], chunks.logprobs)]
            case "predictions" if distribution := self._distribution():
                at, targets = distribution
                whole = targets.whole()
                return [(Predictions.of(self._head(self._states[at]), whole), whole)]
        return []

    def _distribution(self) -> tuple[Tensor, NextTargets | HeadTargets] | None:
        """Return the positions [G] at which the teacher has a distribution, and the targets."""
        if self._taught is None or self._taught.logit_runs is None:
            return None
        targets = self._taught.predicted
        assert isinstance(targets, NextTargets | HeadTargets)
        return self._taught.logit_runs.member, targets  # each run is the token before another one


def _compared(
    head: Callable[[Tensor], Tensor],
    pieces: int,
    states: Tensor,
    targets: NextTargets | HeadTargets,
    terms: Sequence[Term],
) -> tuple[Tensor, Tensor]:
    """Compute from states [G,D] the log-probabilities [G] of the next pieces, and the values [T] of
    terms."""

    def measured(states: Tensor, targets: Any) -> Tensor:
        whole = targets.whole()
        own, share = Predictions.of(head(states), whole), len(states) / max(1, count)
        values = [term.value(own, whole) * share for term in terms]
        return torch.cat([own.following, torch.stack(values)])

    count, size = len(states), len(terms)
    found = _in_slices(measured, pieces, states, targets)
    values = torch.stack([each[-size:] for each in found]).sum(dim=0)
    return torch.cat([each[:-size] for each in found]), values


def _in_slices(
    measure: Callable[[Tensor, Any], Tensor], pieces: int, states: Tensor, targets: Any
) -> list[Tensor]:
    """Call a function of states [G,D] and of targets, a tensor [G] or a dataclass of tensors
    [G,...], for slices of the positions. The backward pass computes the logits again, so they are
    not stored."""
    most = MOST_LOGITS.get(states.device.type, MOST_LOGITS["cuda"])
    if len(states) * pieces <= most:
        return [measure(states, targets)]
    size = max(1, most // pieces)
    # Nothing random is recomputed, so no state of a generator is stored. The reentrant way tracks
    # gradients only if an argument requires one, and the weights of the head are no argument.
    again = partial(checkpoint, measure, use_reentrant=False, preserve_rng_state=False)
    slices = (slice(first, first + size) for first in range(0, len(states), size))
    return [again(states[some], _sliced(targets, some)) for some in slices]


def _sliced(targets: Any, some: slice) -> Any:
    if isinstance(targets, Tensor):
        return targets[some]
    each = vars(targets).items()
    return type(targets)(**{n: v[some] if isinstance(v, Tensor) else v for n, v in each})
