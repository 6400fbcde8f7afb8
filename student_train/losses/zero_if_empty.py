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
        student: Any = args[0] if args else kwargs[next(iter(signature(formula).parameters))]
        rows: Tensor = getattr(student, "following", student)  # of `Predictions`
        # Times 0, not a constant: the loop refuses a loss without a gradient.
        return formula(*args, **kwargs) if rows.numel() else rows.sum() * 0.0

    return guarded
