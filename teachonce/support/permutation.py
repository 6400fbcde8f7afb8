"""Random permutations that are pure functions of a seed.

The raw output of PCG64 is the same in all versions of NumPy (its distributions are not), so a seed
gives the same order for ever.
"""

from __future__ import annotations

import numpy as np
from numpy.random import PCG64, SeedSequence

from teachonce.support.arrays import Array


def permutation(length: int, *seed: int) -> Array:
    """A random permutation of 0..length-1 that depends on nothing but the seed."""
    raw = PCG64(SeedSequence(list(seed))).random_raw(length)
    return np.argsort(raw, kind="stable")
