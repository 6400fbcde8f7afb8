"""Codecs that keep floating-point numbers: `float32`, which is exact, and `float16`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from teachonce.store.format.codecs.codec import Elementwise, wide
from teachonce.support.arrays import Array, Floats

HALF_MAX = 65504.0


class Float32(Elementwise):
    """Keeps the values as they are."""

    dtype = np.dtype(np.float32)
    description = {"encoding": "float32", "error": "none"}

    def to_codes(self, values: Floats) -> Array:
        return values

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        return codes

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.zeros(np.shape(values))


class Float16(Elementwise):
    """Rounds to half precision."""

    dtype = np.dtype(np.float16)
    limit = HALF_MAX
    description = {"encoding": "float16", "error": "relative 2^-11"}

    def to_codes(self, values: Floats) -> Array:
        return values.astype(np.float16)

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        return wide(codes, xp)

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.abs(values) * 2.0**-11 + 2.0**-25
