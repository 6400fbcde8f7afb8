"""Masks that prefer rare words or pieces, for dumps and for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # options read MASK_WORDS, and a --help must not wait for NumPy
    from numpy.typing import ArrayLike

    from teachonce.support.arrays import Array

MASK_WORDS = ("uniform", "rare")
RARENESS = 0.7  # power of a count


def rare_weights(counts: ArrayLike) -> Array:
    """Return count^-0.7, float64 of the same shape (Sanh et al. 2019, after Lample & Conneau 2019).
    A count of 0 has the same weight as a count of 1."""
    import numpy as np

    weights: Array = np.maximum(counts, 1.0) ** -RARENESS
    return weights


def sampling_keys(draws: Array, weights: Array) -> Array:
    """Return -log(1 - draw) / weight for uniform draws in [0, 1), as keys of a weighted random
    sample.

    The n items with the smallest keys are a sample of n without replacement (Efraimidis & Spirakis
    2006). With equal weights, keys ascend with the draws.
    """
    import numpy as np

    # 1 - draw is as uniform as the draw, and never 0.
    keys: Array = -np.log1p(-draws) / weights
    return keys
