"""Encode and decode features: pure functions, arrays in, arrays out (formulas in FORMAT.md).

Encoders take float32 and expect finite numbers in range (the writer checks); decoders give float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.arrays import Array, Floats

CODECS = ("exact", "default", "small")  # from no error to most
FIXED_STEP = 1024.0
FIXED_LAST = 65534
FIXED_ZERO = 65535
ROOT_STEP = 32.0
ROOT_LAST = 254
ROOT_ZERO = 255
GROUP = 64
GROUPS = (GROUP, 32)  # the second in stores of `small` as it was first
COARSE = 5  # of 255 codes of a probability `small` uses every fifth
HALF_MAX = 65504.0

HIDDEN = {"exact": "float32", "default": "int8", "small": "int4"}
LOGPROBS = {"exact": "float32", "default": "fixed", "small": "root"}
REST = {"exact": "float32", "default": "fixed", "small": "fixed"}
ATTENTION = {"exact": "float32", "default": "square", "small": "coarse"}
HEAD = {"exact": "float32", "default": "float16", "small": "int8"}

_DESCRIPTION: dict[str, dict[str, Any]] = {
    "float32": {"encoding": "float32", "error": "none"},
    "float16": {"encoding": "float16", "error": "relative 2^-11"},
    "int8": {
        "encoding": "int8",
        "formula": "value = code * scale[token]",
        "error": "scale/2 <= 1.001 * max|value of the token| / 254",
    },
    "int4": {
        "encoding": "int4",
        "group": GROUP,
        "formula": "value = nibble * scale[token, channel // group]; channel 2j is the low nibble",
        "error": "scale/2 <= 1.001 * max|value of the group| / 14",
    },
    "fixed": {
        "encoding": "fixed",
        "step": 1.0 / FIXED_STEP,
        "last": FIXED_LAST,
        "minus_infinity": FIXED_ZERO,
        "formula": "value = -code * step",
        "error": "2^-11 down to -63.998, clipped there",
    },
    "root": {
        "encoding": "root",
        "step": 1.0 / ROOT_STEP,
        "last": ROOT_LAST,
        "minus_infinity": ROOT_ZERO,
        "formula": "value = -(code * step)^2",
        "error": "sqrt(-value)/32 + 2^-12 down to -63.0, clipped there",
    },
    "square": {
        "encoding": "square",
        "formula": "value = (code / 255)^2",
        "error": "sqrt(value)/255 + 4e-6",
    },
    "coarse": {
        "encoding": "coarse",
        "step": COARSE,
        "formula": "value = (code / 255)^2",
        "error": "5*sqrt(value)/255 + 1e-4",
    },
}


def encodings(codec: str, group: int = GROUP) -> dict[str, Any]:
    """What undoes every lossy array of a store with this codec (JSON)."""
    hidden = dict(_DESCRIPTION[HIDDEN[codec]])
    attention = _DESCRIPTION[ATTENTION[codec]]
    if codec == "small" and group != GROUP:
        hidden["group"], attention = group, _DESCRIPTION["square"]
    if codec != "exact":
        hidden["normalised"] = "state = value * deviation[channel] + mean[channel]"
    return {
        "hidden": hidden,
        "logprobs": dict(_DESCRIPTION[LOGPROBS[codec]]),
        "rest": dict(_DESCRIPTION[REST[codec]]),
        "head": dict(_DESCRIPTION[HEAD[codec]]),
        "attention": dict(attention),
    }


def _scale_up(peak: Floats, levels: int) -> NDArray[np.float16]:
    """The smallest float16 scale with peak <= levels * scale, so that nothing clips."""
    wanted = peak / np.float32(levels)
    scale = wanted.astype(np.float16)
    low = scale.astype(np.float32) * np.float32(levels) < peak
    return np.where(low, np.nextafter(scale, np.float16(np.inf)), scale)


def _divide(values: Floats, scale: Array) -> Floats:
    wide = scale.astype(np.float32)
    return np.divide(values, np.where(wide == 0, np.float32(1), wide), dtype=np.float32)


def encode_int8(values: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """[N, D] -> codes int8 [N, D], scale float16 [N]; max|value| must stay under 127 * 65504."""
    scale = _scale_up(np.abs(values).max(axis=1), 127)
    return np.rint(_divide(values, scale[:, None])).astype(np.int8), scale


def decode_int8(codes: Array, scale: Array) -> Floats:
    """codes [N, D], scale [N] -> float32 [N, D]."""
    return np.multiply(codes, scale.astype(np.float32)[:, None], dtype=np.float32)


def encode_int4(
    values: Floats, group: int = GROUP
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """[N, D] -> nibbles uint8 [N, ceil(D/2)], scale float16 [N, ceil(D/group)]."""
    tokens, width = values.shape
    groups = -(-width // group)
    padded = np.zeros((tokens, groups, group), np.float32)
    padded.reshape(tokens, -1)[:, :width] = values
    scale = _scale_up(np.abs(padded).max(axis=2), 7)
    codes = np.rint(_divide(padded, scale[:, :, None])).astype(np.int8).reshape(tokens, -1)
    nibbles = codes.view(np.uint8) & 15
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return np.ascontiguousarray(packed[:, : -(-width // 2)]), scale


def decode_int4(packed: Array, scale: Array, width: int) -> Floats:
    """nibbles [N, ceil(D/2)], scale [N, ceil(D/group)] of a group of `GROUPS` -> float32 [N, D]."""
    codes = np.empty((*packed.shape, 2), np.int8)
    signed = packed.view(np.int8)
    codes[:, :, 0] = np.left_shift(signed, 4) >> 4
    codes[:, :, 1] = signed >> 4
    values = codes.reshape(len(packed), -1)[:, :width].astype(np.float32)
    values *= by_channel(scale.astype(np.float32), width)
    return values


def by_channel(scale: Array, width: int) -> Array:
    """scale [N, ceil(D/group)] -> [N, D]; the number of columns tells which of `GROUPS` it is."""
    group = next(g for g in GROUPS if -(-width // g) == scale.shape[1])
    return np.repeat(scale, group, axis=1)[:, :width]


def encode_hidden(
    codec: str, states: Floats, mean: Floats, deviation: Floats, group: int = GROUP
) -> list[Array]:
    """[N, D] raw states -> [values] (exact) or [values, scale]."""
    if codec == "exact":
        return [states]
    normalised = (states - mean) / deviation
    return list(encode_int8(normalised) if codec == "default" else encode_int4(normalised, group))


def decode_scaled(values: Array, scale: Array, width: int) -> Floats:
    """int8 or packed int4 values with their scale -> float32 [N, D] (normalised units)."""
    if values.dtype == np.int8:
        return decode_int8(values, scale)
    return decode_int4(values, scale, width)


def encode_fixed(logs: Floats) -> NDArray[np.uint16]:
    """Log-probabilities <= 0, or -inf -> uint16 in steps of 2^-10."""
    codes = np.clip(np.rint(-logs * FIXED_STEP), 0, FIXED_LAST)
    return np.where(np.isneginf(logs), FIXED_ZERO, codes).astype(np.uint16)


def decode_fixed(codes: Array) -> Floats:
    """uint16 codes -> float32 log-probabilities."""
    logs = np.multiply(codes, np.float32(-1.0 / FIXED_STEP), dtype=np.float32)
    logs[codes == FIXED_ZERO] = -np.inf
    return logs


_ROOT_TABLE = -np.square(np.arange(256, dtype=np.float32) / np.float32(ROOT_STEP))
_ROOT_TABLE[ROOT_ZERO] = -np.inf


def encode_root(logs: Floats) -> NDArray[np.uint8]:
    """Log-probabilities <= 0, or -inf -> uint8 square-root codes."""
    codes = np.clip(np.rint(np.sqrt(np.maximum(-logs, 0)) * ROOT_STEP), 0, ROOT_LAST)
    return np.where(np.isneginf(logs), ROOT_ZERO, codes).astype(np.uint8)


def decode_root(codes: Array) -> Floats:
    """uint8 codes -> float32 log-probabilities."""
    return np.take(_ROOT_TABLE, codes)


def encode_logs(encoding: str, logs: Floats) -> Array:
    """Log-probabilities by `float32`, `fixed` or `root`."""
    if encoding == "float32":
        return logs
    return encode_fixed(logs) if encoding == "fixed" else encode_root(logs)


def decode_logs(codes: Array) -> Floats:
    """Undo `encode_logs`: the dtype names the encoding."""
    if codes.dtype == np.float32:
        return np.asarray(codes)
    return decode_fixed(codes) if codes.dtype == np.uint16 else decode_root(codes)


def encode_attention(codec: str, probabilities: Floats) -> Array:
    """Probabilities in 0..1 -> float32 (exact) or uint8 square-root codes."""
    if codec == "exact":
        return probabilities
    step = COARSE if codec == "small" else 1
    codes: Array = np.rint(np.sqrt(np.clip(probabilities, 0, 1)) * (255 // step)).astype(np.uint8)
    codes *= np.uint8(step)
    return codes


def decode_attention(codes: Array) -> Floats:
    """Undo `encode_attention`."""
    if codes.dtype == np.float32:
        return np.asarray(codes)
    # Dividing is three times as fast as a table of the 256 values.
    probabilities = np.divide(codes, np.float32(255), dtype=np.float32)
    return np.square(probabilities, out=probabilities)


def encode_head(codec: str, values: Floats) -> list[Array]:
    """[N, D] inputs of the LM head -> [values], or [values, scale] for codec `small`."""
    if codec == "small":
        return list(encode_int8(values))
    return [values if codec == "exact" else values.astype(np.float16)]


def decode_head(values: Array, scale: Array | None) -> Floats:
    """Undo `encode_head`."""
    return values.astype(np.float32, copy=False) if scale is None else decode_int8(values, scale)
