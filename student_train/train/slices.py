"""Computes next-token losses in slices of positions, so that no tensor has a logit for every token
and piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachonce.student_train.losses.next_token import HeadTargets

MOST_LOGITS = 2**25  # at once: 128 MB in float32


def exceeds(places: int, vocabulary: int) -> bool:
    """Return whether the logits of this number of positions are too many for memory at once."""
    return places * vocabulary > MOST_LOGITS


def whole(targets: Any) -> Any:
    """Return targets in the form that a formula takes: `HeadTargets` as distributions, all others
    unchanged."""
    return targets.whole() if isinstance(targets, HeadTargets) else targets


def mean_in_slices(
    measure: Callable[[Tensor, Any], Tensor], states: Tensor, targets: Any, vocabulary: int
) -> Tensor:
    """Compute a loss that is a mean over G positions from states [G,D] and targets, which are
    labels [G] or a dataclass of tensors [G,...]."""

    def measured(states: Tensor, targets: Any) -> Tensor:
        return measure(states, whole(targets))

    parts = [
        _recomputed(measured, states[some], _sliced(targets, some))
        * (len(states[some]) / len(states))
        for some in _slices(len(states), vocabulary)
    ]
    return torch.stack(parts).sum()


def rows_in_slices(
    measure: Callable[[Tensor, Tensor], Tensor], states: Tensor, labels: Tensor, vocabulary: int
) -> Tensor:
    """Compute `measure` of states [G,D] and labels [G], one number per position: [G]."""
    if not exceeds(len(states), vocabulary):
        return measure(states, labels)
    some = _slices(len(states), vocabulary)
    return torch.cat([_recomputed(measure, states[each], labels[each]) for each in some])


def _recomputed(measure: Callable[..., Tensor], *given: Any) -> Tensor:
    """Call a function. The backward pass computes its logits again, so they are not stored."""
    # Nothing random is recomputed, so no state of a generator is stored. The reentrant way tracks
    # gradients only if an argument requires one, and the weights of the head are no argument.
    found: Tensor = checkpoint(measure, *given, use_reentrant=False, preserve_rng_state=False)
    return found


def _slices(count: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, MOST_LOGITS // vocabulary)
    return (slice(first, first + size) for first in range(0, count, size))


def _sliced(targets: Any, some: slice) -> Any:
    if isinstance(targets, Tensor):
        return targets[some]
    each = vars(targets).items()
    return type(targets)(**{n: v[some] if isinstance(v, Tensor) else v for n, v in each})
