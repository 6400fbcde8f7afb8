"""The built-in codecs: one code for each value, or small integers with a float16 scale. Also ranks
the ids of a part by their frequency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from teachonce.store.format.codecs.codec import (
    DENSE,
    FAST,
    Codec,
    CodecArray,
    Elementwise,
    Packing,
    as_float32,
)
from teachonce.support.arrays import Array, Floats

HALF_MAX = 65504.0


class Float32(Elementwise):
    """Stores the values unchanged."""

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
        return as_float32(codes, xp)

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        # 2^-25 is half of the smallest float16, 2^-24.
        return np.abs(values) * 2.0**-11 + 2.0**-25


# Equal steps of a log-probability are equal relative steps of the probability. float16 has the same
# size, but from -8 on it errs by up to 2^-8 instead of 2^-11.
# As FIXED_STEP and ROOT_STEP are powers of two, decoding is exact: each device gives the same
# values, and encoding these again gives the same codes.
FIXED_STEP = 1024.0
FIXED_LAST = 65534
FIXED_ZERO = 65535
# 254 steps reach down to -63, and near 0 they are 1/1024 apart. Mean KL of 16 ids: 4e-5.
ROOT_STEP = 32.0
ROOT_LAST = 254
ROOT_ZERO = 255


@dataclass(frozen=True)
class Fixed(Elementwise):
    """Stores log-probabilities <= 0, or -inf, in steps of 2^-10."""

    packing: Packing | None = FAST

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
        # The laws allow 0.01 over 0, for rounding: such values become 0 (FORMAT.md, section 7).
        codes = np.clip(np.rint(-values * FIXED_STEP), 0, FIXED_LAST)
        return np.where(np.isneginf(values), FIXED_ZERO, codes).astype(np.uint16)

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        logs = as_float32(codes, xp)
        logs *= -1.0 / FIXED_STEP
        logs[codes == FIXED_ZERO] = -np.inf
        return logs

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.full(np.shape(values), 2.0**-11)


class Root(Elementwise):
    """Stores square roots of -log p: values near 0 (likely ids) get the smallest error."""

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
        # The root of a log-probability slightly over 0 would be NaN, which has no code.
        codes = np.clip(np.rint(np.sqrt(np.maximum(-values, 0)) * ROOT_STEP), 0, ROOT_LAST)
        return np.where(np.isneginf(values), ROOT_ZERO, codes).astype(np.uint8)

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        roots = as_float32(codes, xp)
        roots *= 1.0 / ROOT_STEP
        roots *= -roots
        roots[codes == ROOT_ZERO] = -np.inf
        return roots

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        # Half a step of the root: (r + 1/64)^2 - r^2 = r/32 + 2^-12.
        return np.sqrt(np.maximum(0, -values)) / 32 + 2.0**-12


@dataclass(frozen=True)
class Square(Elementwise):
    """Stores a probability p as 255 * sqrt(p)."""

    packing: Packing | None = FAST

    dtype = np.dtype(np.uint8)
    step: ClassVar[int] = 1  # only every step-th of the 255 codes is used

    description = {
        "encoding": "square",
        "formula": "value = (code / 255)^2",
        "error": "sqrt(value)/255 + 4e-6",
    }

    def to_codes(self, values: Floats) -> Array:
        # The laws allow attention of up to 1.01, whose code of 256 would not fit into a byte.
        codes: Array = np.rint(np.sqrt(np.clip(values, 0, 1)) * (255 // self.step)).astype(np.uint8)
        codes *= np.uint8(self.step)
        return codes

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        # Division is three times as fast as a table of 256 values. A GPU may round differently.
        roots = codes / np.float32(255)
        roots *= roots
        return roots

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        # Half a step of the root: (r + s/510)^2 - r^2 = rs/255 + s^2/510^2.
        return self.step * np.sqrt(values) / 255 + self.step**2 * 4e-6


@dataclass(frozen=True)
class Coarse(Square):
    """Uses every fifth code of `Square`, which compresses to a fraction of the size."""

    packing: Packing | None = DENSE

    # 255 = 5 x 51, so that 1 has an exact code. Packed with zstd, a token's maps take 29 bytes in
    # place of 68, with errors of at most 0.02.
    step = 5

    description = {
        "encoding": "coarse",
        "step": step,
        "formula": "value = (code / 255)^2",
        "error": "5*sqrt(value)/255 + 1e-4",
    }


SCALE = np.dtype(np.float16)
SCALE_UP = 1.001  # the most by which rounding up to float16 raises a (normal) scale


@dataclass(frozen=True)
class Int8(Codec):
    """Stores codes -127..127, with a scale for each token."""

    # bitshuffle and lz4 save 1 % of normalised int8 states, and reading would have to decode them.
    packing: Packing | None = None

    names = ("values", "scale")
    # A larger value would need an infinite float16 scale.
    limit = HALF_MAX * 127

    description = {
        "encoding": "int8",
        "formula": "value = code * scale[token]",
        "error": "scale/2 <= 1.001 * max|value of the token| / 254",
    }

    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        return {
            "values": CodecArray(np.dtype(np.int8), row, self.packing),
            "scale": CodecArray(SCALE, row[:-1], FAST),
        }

    def encode(self, values: Floats) -> dict[str, Array]:
        scale = _scale_up(np.abs(values).max(axis=1), 127)
        codes = np.rint(_divide(values, scale[:, None])).astype(np.int8)
        return {"values": codes, "scale": scale}

    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        return stored["values"] * as_float32(stored["scale"], xp)[:, None]

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        if stored is None:
            half = SCALE_UP * np.abs(values).max(axis=1, keepdims=True) / 254
        else:
            half = stored["scale"].astype(np.float64)[:, None] / 2
        return np.broadcast_to(half, values.shape)


@dataclass(frozen=True)
class Int4(Codec):
    """Stores codes -7..7, two a byte, with a scale for each `group` of channels of a token."""

    group: int

    names = ("values", "scale")
    binds = ("group",)
    limit = HALF_MAX * 7

    @property
    def description(self) -> dict[str, Any]:
        return {
            "encoding": "int4",
            "group": self.group,
            "formula": "value = nibble * scale[token, channel // group];"
            " channel 2j is the low nibble",
            "error": "scale/2 <= 1.001 * max|value of the group| / 14",
        }

    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        (width,) = row
        return {
            "values": CodecArray(np.dtype(np.uint8), (-(-width // 2),), DENSE),
            "scale": CodecArray(SCALE, (-(-width // self.group),), FAST),
        }

    def encode(self, values: Floats) -> dict[str, Array]:
        tokens, width = values.shape
        padded = self._groups(values)
        scale = _scale_up(np.abs(padded).max(axis=2), 7)
        codes = np.rint(_divide(padded, scale[:, :, None])).astype(np.int8).reshape(tokens, -1)
        nibbles = codes.view(np.uint8) & 15
        packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return {"values": np.ascontiguousarray(packed[:, : -(-width // 2)]), "scale": scale}

    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        packed, scale = stored["values"].view(xp.int8), as_float32(stored["scale"], xp)
        tokens, groups = scale.shape
        filled = 2 * packed.shape[1]
        # NumPy's arrays have a device as tensors do, since version 2.0.
        values = xp.empty((tokens, groups * self.group), dtype=xp.float32, device=packed.device)
        # As int8, a shift to the right extends the sign bit of a nibble.
        values[:, 0:filled:2] = (packed << 4) >> 4
        values[:, 1:filled:2] = packed >> 4
        # These channels are cut off below, but uninitialised numbers could overflow in the product.
        values[:, filled:] = 0
        grouped = values.reshape(tokens, groups, self.group)
        grouped *= scale[:, :, None]
        return grouped.reshape(tokens, -1)[:, : row[0]]

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        if stored is None:
            half = SCALE_UP * np.abs(self._groups(values)).max(axis=2) / 14
        else:
            half = stored["scale"].astype(np.float64) / 2
        return np.repeat(half, self.group, axis=1)[:, : values.shape[1]]

    def _groups(self, values: Floats) -> Floats:
        """Reshape [N, D] to [N, groups, group], padded with 0."""
        tokens, width = values.shape
        padded = np.zeros((tokens, -(-width // self.group), self.group), np.float32)
        padded.reshape(tokens, -1)[:, :width] = values
        return padded


def _scale_up(peak: Floats, levels: int) -> NDArray[np.float16]:
    """Return the smallest float16 scale with peak <= levels * scale, so that nothing is clipped."""
    exact = peak / np.float32(levels)
    scale = exact.astype(np.float16)
    # Rounding to the nearest float16 may give less than the peak needs.
    low = scale.astype(np.float32) * np.float32(levels) < peak
    return np.where(low, np.nextafter(scale, np.float16(np.inf)), scale)


def _divide(values: Floats, scale: Array) -> Floats:
    divisor = scale.astype(np.float32)
    # A scale of 0 means that all values are 0 (FORMAT.md, section 7).
    return np.divide(values, np.where(divisor == 0, np.float32(1), divisor), dtype=np.float32)


# A place is the index of an id in the list that `rank_ids` returns. Most places are small, so they
# compress to two thirds of the size of the ids (FORMAT.md, section 6).
# Rows that `look_up` converts at a time. Their indices stay in the processor's cache, which takes a
# third less time than all rows at once.
ROWS = 1024


def rank_ids(ids: Array) -> tuple[Array, Array]:
    """Return the rank of each id in the list of distinct ids, uint32 [N, K], and this list [R].

    The list, uint32, descends by frequency; of equally frequent ids the smaller comes first.
    """
    # A count for each id up to the largest needs no sort of all N * K ids, as np.unique does.
    counts = np.bincount(ids.reshape(-1))
    used = np.flatnonzero(counts)
    # Stable: with equal counts in any order, equal parts could have different bytes.
    distinct = used[np.argsort(-counts[used], kind="stable")]
    rank = np.empty(len(counts), np.uint32)
    rank[distinct] = np.arange(len(distinct), dtype=np.uint32)
    return rank[ids], distinct.astype(np.uint32)


def look_up(distinct: Array, places: Array, out: Array) -> None:
    """Look up `distinct[places]` and write the ids into `out`.

    distinct: [R]. places: [N, K], each below R. out: [N, K]; may be `places` itself.
    """
    for begin in range(0, len(places), ROWS):
        rows = slice(begin, begin + ROWS)
        # `out` may be `places` itself, as take first copies uint32 indices to int64. Callers
        # compare the places with R, because clipping would hide a wrong one.
        np.take(distinct, places[rows], out=out[rows], mode="clip")
