"""Types of arrays, and flat arrays of ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]


def starts(sizes: ArrayLike) -> Array:
    """Where each of n rows begins in a flat array, and the total: [n] -> int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def begins(sizes: ArrayLike) -> Array:
    """Where each of n rows begins in a flat array: [n] -> int64 [n]."""
    return starts(sizes)[:-1]


def ranges(begin: Array, sizes: Array) -> Array:
    """int64 [sum of sizes]: begin[0]..begin[0] + sizes[0], begin[1]..., one after another."""
    start = starts(sizes)
    return np.repeat(begin - start[:-1], sizes) + np.arange(start[-1])
