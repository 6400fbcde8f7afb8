"""Types of arrays, and flat arrays of ragged rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]


def starts(sizes: Array) -> Array:
    """Where each of n rows begins in a flat array, and the total: [n] -> int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def ranges(begin: Array, sizes: Array) -> Array:
    """begin[0]..begin[0]+sizes[0], begin[1]..., one after another."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - sizes), sizes) + np.arange(total)
