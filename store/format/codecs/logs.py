"""Codecs of log-probabilities: `fixed` in equal steps, `root` in steps of the square root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from teachonce.store.format.codecs.codec import DENSE, Elementwise, wide
from teachonce.support.arrays import Array, Floats

FIXED_STEP = 1024.0
FIXED_LAST = 65534
FIXED_ZERO = 65535
ROOT_STEP = 32.0
ROOT_LAST = 254
ROOT_ZERO = 255


class Fixed(Elementwise):
    """Keeps log-probabilities <= 0, or -inf, in steps of 2^-10."""

    dtype = np.dtype(np.uint16)
    binds = ("step", "minus_infinity")
    lowest = -63.998
    description = {
        "encoding": "fixed",
        "step": 1.0 / FIXED_STEP,
        "last": FIXED_LAST,
        "minus_infinity": FIXED_ZERO,
        "formula": "value = -code * step",
        "error": "2^-11 down to -63.998, clipped there",
    }

    def to_codes(self, values: Floats) -> Array:
        codes = np.clip(np.rint(-values * FIXED_STEP), 0, FIXED_LAST)
        return np.where(np.isneginf(values), FIXED_ZERO, codes).astype(np.uint16)

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        logs = wide(codes, xp)
        logs *= -1.0 / FIXED_STEP
        logs[codes == FIXED_ZERO] = -np.inf
        return logs

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.full(np.shape(values), 2.0**-11)


class Root(Elementwise):
    """Keeps log-probabilities <= 0, or -inf, more exactly the nearer they are to 0."""

    dtype = np.dtype(np.uint8)
    packing = DENSE
    binds = ("step", "minus_infinity")
    lowest = -63.0
    description = {
        "encoding": "root",
        "step": 1.0 / ROOT_STEP,
        "last": ROOT_LAST,
        "minus_infinity": ROOT_ZERO,
        "formula": "value = -(code * step)^2",
        "error": "sqrt(-value)/32 + 2^-12 down to -63.0, clipped there",
    }

    def to_codes(self, values: Floats) -> Array:
        codes = np.clip(np.rint(np.sqrt(np.maximum(-values, 0)) * ROOT_STEP), 0, ROOT_LAST)
        return np.where(np.isneginf(values), ROOT_ZERO, codes).astype(np.uint8)

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        roots = wide(codes, xp)
        roots *= 1.0 / ROOT_STEP
        roots *= -roots
        roots[codes == ROOT_ZERO] = -np.inf
        return roots

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.sqrt(np.maximum(0, -values)) / 32 + 2.0**-12
