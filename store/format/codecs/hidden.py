"""Hidden states: a codec, and the calibration of channels that states are taken relative to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from teachonce.store.format.codecs.codec import Codec
from teachonce.support.arrays import Array, Floats

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
