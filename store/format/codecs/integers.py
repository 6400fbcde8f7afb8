"""Codecs that keep small integers with a float16 scale: `int8` for a token, `int4` for a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teachonce.store.format.codecs.codec import DENSE, FAST, Codec, CodecArray, Packing, wide
from teachonce.store.format.codecs.elementwise import HALF_MAX
from teachonce.support.arrays import Array, Floats

SCALE = np.dtype(np.float16)
SCALE_UP = 1.001  # the most by which rounding up to float16 raises a (normal) scale


@dataclass(frozen=True)
class Int8(Codec):
    """Codes -127..127, and a scale for each token."""

    packing: Packing | None = None

    names = ("values", "scale")
    limit = HALF_MAX * 127

    @property
    def description(self) -> dict[str, Any]:
        return {
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
        return stored["values"] * wide(stored["scale"], xp)[:, None]

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        if stored is None:
            half = SCALE_UP * np.abs(values).max(axis=1, keepdims=True) / 254
        else:
            half = stored["scale"].astype(np.float64)[:, None] / 2
        return np.broadcast_to(half, values.shape)


@dataclass(frozen=True)
class Int4(Codec):
    """Codes -7..7, two in a byte, and a scale for each `group` of channels of a token."""

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
        packed, scale = stored["values"].view(xp.int8), wide(stored["scale"], xp)
        tokens, groups = scale.shape
        there = 2 * packed.shape[1]
        values = xp.empty((tokens, groups * self.group), dtype=xp.float32, device=packed.device)
        values[:, 0:there:2] = (packed << 4) >> 4
        values[:, 1:there:2] = packed >> 4
        values[:, there:] = 0
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
        """[N, D] -> [N, groups, group], filled up with 0."""
        tokens, width = values.shape
        padded = np.zeros((tokens, -(-width // self.group), self.group), np.float32)
        padded.reshape(tokens, -1)[:, :width] = values
        return padded


def _scale_up(peak: Floats, levels: int) -> NDArray[np.float16]:
    """The smallest float16 scale with peak <= levels * scale, so that nothing clips."""
    wanted = peak / np.float32(levels)
    scale = wanted.astype(np.float16)
    low = scale.astype(np.float32) * np.float32(levels) < peak
    return np.where(low, np.nextafter(scale, np.float16(np.inf)), scale)


def _divide(values: Floats, scale: Array) -> Floats:
    divisor = scale.astype(np.float32)
    return np.divide(values, np.where(divisor == 0, np.float32(1), divisor), dtype=np.float32)
