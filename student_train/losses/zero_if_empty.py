"""The value of a loss that has nothing to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:  # `loss.py` must not wait for torch
    from torch import Tensor

P = ParamSpec("P")


def zero_if_empty(formula: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return the formula with the value 0, and a gradient, for a student's side without rows."""

    @wraps(formula)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        rows = rows_of(args[0] if args else kwargs[next(iter(signature(formula).parameters))])
        # Times 0, not a constant: the loop refuses a loss without a gradient.
        return formula(*args, **kwargs) if rows.numel() else rows.sum() * 0.0

    return guarded


def rows_of(student: Any) -> Tensor:
    """Return the student's side of a loss as a tensor: of `Predictions`, the next pieces."""
    rows: Tensor = getattr(student, "following", student)
    return rows
