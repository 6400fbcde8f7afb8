"""Codecs with one code for each value: floats, log-probabilities and probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from teachonce.store.format.codecs.codec import DENSE, FAST, Elementwise, Packing, wide
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


@dataclass(frozen=True)
class Square(Elementwise):
    """Keeps 255 times the square root of a probability."""

    packing: Packing | None = FAST

    dtype = np.dtype(np.uint8)
    step: ClassVar[int] = 1  # of the 255 codes only every step-th is used

    @property
    def description(self) -> dict[str, Any]:
        return {
            "encoding": "square",
            "formula": "value = (code / 255)^2",
            "error": "sqrt(value)/255 + 4e-6",
        }

    def to_codes(self, values: Floats) -> Array:
        codes: Array = np.rint(np.sqrt(np.clip(values, 0, 1)) * (255 // self.step)).astype(np.uint8)
        codes *= np.uint8(self.step)
        return codes

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        # Dividing is three times as fast as a table of 256 values. A GPU may round it otherwise.
        roots = codes / np.float32(255)
        roots *= roots
        return roots

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return self.step * np.sqrt(values) / 255 + self.step**2 * 4e-6


@dataclass(frozen=True)
class Coarse(Square):
    """Keeps every fifth code of `square`, which packs to a fraction."""

    packing: Packing | None = DENSE

    step = 5

    @property
    def description(self) -> dict[str, Any]:
        return {
            "encoding": "coarse",
            "step": self.step,
            "formula": "value = (code / 255)^2",
            "error": "5*sqrt(value)/255 + 1e-4",
        }
