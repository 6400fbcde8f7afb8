"""Masks that prefer what is rare, in dumps and in training alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # options read MASK_WORDS, and a --help must not wait for NumPy
    from numpy.typing import ArrayLike

    from teachonce.support.arrays import Array

MASK_WORDS = ("uniform", "rare")
RARENESS = 0.7  # power of a count


def rare_weights(counts: ArrayLike) -> Array:
    """Return float64 of the same shape: count^-0.7 (Sanh et al. 2019, after Lample & Conneau 2019);
    what was never counted weighs as much as what was counted once."""
    import numpy as np

    weights: Array = np.maximum(counts, 1.0) ** -RARENESS
    return weights


def waits(draws: Array, weights: Array) -> Array:
    """Return -log(draw) / weight of uniform draws in [0, 1): the n smallest are n things drawn one
    after the other, none twice, each by its weight (Efraimidis & Spirakis 2006). Equal weights
    leave the order of the draws as it is."""
    import numpy as np

    # Of 1 - draw, which is as uniform as the draw, and never 0.
    found: Array = -np.log1p(-draws) / weights
    return found
