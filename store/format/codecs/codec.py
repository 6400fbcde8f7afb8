"""The interface of codecs: arrays, encode, decode, error bound, description.

`HiddenCodec` normalises channels by the calibration before a codec encodes them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from teachonce.support.arrays import Array, Floats


class Packing(NamedTuple):
    """Holds the Blosc settings of an array, named as in the Python bindings of Blosc."""

    cname: Literal["lz4", "lz4hc", "zstd"]
    clevel: int
    shuffle: str


# Bit-packed ids were no smaller than with bitshuffle and lz4, which decodes 2.1 GB a second. Levels
# above 1 gain nothing.
FAST = Packing("lz4", 1, "bitshuffle")
DENSE = Packing("zstd", 3, "shuffle")  # a higher level takes twice the time to save 1 %
# With LEAN, 64 places and log-probabilities of a token take 185 bytes (FAST: 200). They are packed
# in 5 microseconds (FAST: 0.3) and decoded in 0.13 (FAST: 0.20). Level 5 would save 6 more bytes,
# and pack in 7 microseconds.
LEAN = Packing("lz4hc", 3, "shuffle")


class CodecArray(NamedTuple):
    """Describes an array of a codec: its dtype, the shape of a row, and its compression."""

    dtype: np.dtype[Any]
    row: tuple[int, ...]
    packing: Packing | None


class Codec(ABC):
    """Encodes rows of float32 values into named arrays, and decodes them.

    Values passed to `encode` are finite and below `limit` in magnitude (the part writer checks
    this); log-probabilities may be -inf.
    """

    names: ClassVar[tuple[str, ...]] = ("values",)  # of its arrays
    binds: ClassVar[tuple[str, ...]] = ()  # keys of the description that decoding depends on
    limit: ClassVar[float] = math.inf
    lowest: ClassVar[float] = -math.inf  # lower values are decoded as about this

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Describe how to decode, as JSON: `encoding` and the keys of `binds`, then notes for
        people."""

    @abstractmethod
    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        """Return the codec's arrays, by name, for values whose rows have the shape `row`."""

    @abstractmethod
    def encode(self, values: Floats) -> dict[str, Array]:
        """Encode values [N, *row]; return arrays [N, ...] by name."""

    @abstractmethod
    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        """Decode the arrays of `encode`; return float32 [N, *row].

        The caller may modify the result, except with `Float32`, which returns the stored array.
        `xp` is the arrays' module: numpy, or torch on any device.
        """

    @abstractmethod
    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        """Return an upper bound of the absolute error that encoding can cause, for each of `values`
        [N, *row].

        values: the original or the decoded values; pass the larger in magnitude.
        stored: the encoded arrays; some codecs give a tighter bound with them.
        """

    def unlike(self, other: Mapping[str, Any]) -> list[str]:
        """Return the keys of the description `other` that would change how arrays are decoded."""
        # Only these keys: writers may word the others differently (FORMAT.md, section 7).
        expected = self.description
        return [key for key in ("encoding", *self.binds) if other.get(key) != expected[key]]


class Elementwise(Codec):
    """Encodes each value as one code, in one array."""

    dtype: ClassVar[np.dtype[Any]]
    packing: Packing | None = FAST

    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        return {"values": CodecArray(self.dtype, row, self.packing)}

    def encode(self, values: Floats) -> dict[str, Array]:
        return {"values": self.to_codes(values)}

    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        return self.from_codes(stored["values"], xp)

    @abstractmethod
    def to_codes(self, values: Floats) -> Array:
        """Encode values of any shape."""

    @abstractmethod
    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        """Decode codes of any shape to float32; `xp` as for `decode`."""


def as_float32(values: Any, xp: Any) -> Any:
    """Convert values to float32; copies only if they have another dtype."""
    # NumPy and torch both have asarray with a dtype; tensors have no astype.
    return xp.asarray(values, dtype=xp.float32)


NORMALISED = "state = value * deviation[channel] + mean[channel]"


@dataclass(frozen=True)
class HiddenCodec:
    """Encodes hidden states [N, D].

    If `normalised`, each channel is encoded as (state - mean) / deviation; mean and standard
    deviation are float32 [D].
    """

    codec: Codec
    # A single channel at 18 standard deviations would set the scale of every token. Normalised by
    # channel, int8 has half the error: relative L2 0.7 % in place of 1.4 %.
    normalised: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the arrays of one hidden state."""
        return self.codec.names

    @property
    def description(self) -> dict[str, Any]:
        """Return the codec's description, with the formula of the normalisation."""
        return self.codec.description | ({"normalised": NORMALISED} if self.normalised else {})

    def unlike(self, other: Mapping[str, Any]) -> list[str]:
        """See `Codec.unlike`. Only the presence of `normalised` matters, not its text."""
        differs = bool(other.get("normalised")) != self.normalised
        return self.codec.unlike(other) + ["normalised"] * differs

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        """Return the error bound of `values`, which are normalised; see `Codec.bound`."""
        return self.codec.bound(values, stored)

    def normalise(self, states: Floats, mean: Floats, deviation: Floats) -> Floats:
        """Return what the codec encodes for raw states [N, D]."""
        return (states - mean) / deviation if self.normalised else states

    def encode(self, states: Floats, mean: Floats, deviation: Floats) -> dict[str, Array]:
        """Encode raw states [N, D]; return the codec's arrays."""
        return self.codec.encode(self.normalise(states, mean, deviation))

    def decode(self, stored: Mapping[str, Any], mean: Any, deviation: Any, xp: Any = np) -> Any:
        """Decode the codec's arrays to raw states [N, D]; `xp` as for `Codec.decode`."""
        states = self.codec.decode(stored, mean.shape, xp)
        if not self.normalised:
            return states
        if states is stored[self.names[0]]:  # `Float32` returns the stored array, which must stay
            return states * deviation + mean
        states *= deviation  # in place, which takes a third less time
        states += mean
        return states

    def decode_normalised(
        self, stored: Mapping[str, Any], mean: Any, deviation: Any, xp: Any = np
    ) -> Any:
        """Decode to (state - mean) / deviation, [N, D]; `xp` as for `Codec.decode`."""
        states = self.codec.decode(stored, mean.shape, xp)
        return states if self.normalised else (states - mean) / deviation
