"""What every codec has: its arrays, encode and decode, the bound of its error, a description.

`HiddenCodec` puts the calibration of channels before a codec.
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
    """How Blosc packs an array, in the words of its bindings."""

    cname: Literal["lz4", "zstd"]
    clevel: int
    shuffle: str


FAST = Packing("lz4", 1, "bitshuffle")
DENSE = Packing("zstd", 3, "shuffle")  # a higher level takes twice the time for a hundredth


class CodecArray(NamedTuple):
    """An array of a codec: its dtype, the shape of a row, and how it is packed."""

    dtype: np.dtype[Any]
    row: tuple[int, ...]
    packing: Packing | None


class Codec(ABC):
    """Encodes rows of float32 values into named arrays, and decodes these.

    The values given to `encode` are finite and below `limit` in magnitude (the part writer checks
    it); log-probabilities may be -inf.
    """

    names: ClassVar[tuple[str, ...]] = ("values",)  # of its arrays
    binds: ClassVar[tuple[str, ...]] = ()  # keys of the description that a reader decodes by
    limit: ClassVar[float] = math.inf
    lowest: ClassVar[float] = -math.inf  # what is lower is read as about this

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What undoes the codec, as JSON: `encoding` and the keys of `binds`, then notes."""

    @abstractmethod
    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        """The arrays of values whose rows have the shape `row`, by their names."""

    @abstractmethod
    def encode(self, values: Floats) -> dict[str, Array]:
        """Values [N, *row] -> arrays [N, ...] by their names."""

    @abstractmethod
    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        """Arrays of `encode` -> float32 [N, *row], which may be altered (but for `Float32`).

        `xp` is the module of the arrays: numpy, or torch on whatever device they are.
        """

    @abstractmethod
    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        """The largest error of each of `values` [N, *row].

        `values` are as they were or as they are decoded, whichever is further from 0. The arrays
        that are `stored` of them may tell it more exactly.
        """

    def unlike(self, found: Mapping[str, Any]) -> list[str]:
        """Keys by which arrays with the description `found` would be decoded otherwise."""
        expected = self.description
        return [key for key in ("encoding", *self.binds) if found.get(key) != expected[key]]


class Elementwise(Codec):
    """A codec with one array of codes, each of one value."""

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
        """Values of any shape -> codes."""

    @abstractmethod
    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        """Codes of any shape -> float32 values; `xp` as for `decode`."""


def wide(values: Any, xp: Any) -> Any:
    """The values in float32, copied only if they are of another dtype."""
    return xp.asarray(values, dtype=xp.float32)


NORMALISED = "state = value * deviation[channel] + mean[channel]"


@dataclass(frozen=True)
class HiddenCodec:
    """Encodes states [N, D], less the mean of their channels and over their deviation (float32
    [D] each) where `normalised`."""

    codec: Codec
    normalised: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of one hidden state."""
        return self.codec.names

    @property
    def description(self) -> dict[str, Any]:
        """The codec's description, and how the calibration is undone."""
        return self.codec.description | ({"normalised": NORMALISED} if self.normalised else {})

    def unlike(self, found: Mapping[str, Any]) -> list[str]:
        """See `Codec.unlike`. Of `normalised` it binds whether it is there, not its words."""
        other = bool(found.get("normalised")) != self.normalised
        return self.codec.unlike(found) + ["normalised"] * other

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        """The codec's bound for `values` as it encodes them; see `Codec.bound`."""
        return self.codec.bound(values, stored)

    def normalise(self, states: Floats, mean: Floats, deviation: Floats) -> Floats:
        """Raw states -> what the codec encodes."""
        return (states - mean) / deviation if self.normalised else states

    def encode(self, states: Floats, mean: Floats, deviation: Floats) -> dict[str, Array]:
        """Raw states -> the arrays of the codec."""
        return self.codec.encode(self.normalise(states, mean, deviation))

    def decode(self, stored: Mapping[str, Any], mean: Any, deviation: Any, xp: Any = np) -> Any:
        """Arrays of the codec -> raw states; `xp` as for `Codec.decode`."""
        states = self.codec.decode(stored, mean.shape, xp)
        if self.normalised:
            states *= deviation
            states += mean
        return states

    def decode_normalised(
        self, stored: Mapping[str, Any], mean: Any, deviation: Any, xp: Any = np
    ) -> Any:
        """Arrays of the codec -> (state - mean) / deviation; `xp` as for `Codec.decode`."""
        states = self.codec.decode(stored, mean.shape, xp)
        return states if self.normalised else (states - mean) / deviation
