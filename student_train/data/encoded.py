"""The teacher's states and maps as the store encodes them. The device that trains decodes and pools
them, so a quarter of float32's bytes or less is copied there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from teachonce.store.format.codecs.codec import Elementwise, HiddenCodec
from teachonce.student_train.data.pooling import MapPooling, pool_members


@dataclass(frozen=True)
class TeacherStates:
    """Holds stored states of J tokens, to be averaged over G runs of them. Where `rows` is None,
    the J tokens are all of `stored`.

    Arrays, calibration and codec are those of a `HiddenBatch`.
    """

    stored: dict[str, Tensor]
    mean: Tensor
    deviation: Tensor
    codec: HiddenCodec
    rows: Tensor | None  # int64 [J] of the stored arrays
    begin: Tensor  # int64 [G]: where runs begin among the J

    def normalised(self) -> Tensor:
        """Decode and pool (state - mean) / deviation: float32 [G,D]."""
        states = self.codec.decode_normalised(self._rows(), self.mean, self.deviation, torch)
        return self._pooled(states)

    def states(self) -> Tensor:
        """Decode and pool raw states: float32 [G,D]."""
        return self._pooled(self.codec.decode(self._rows(), self.mean, self.deviation, torch))

    def _rows(self) -> dict[str, Tensor]:
        if self.rows is None:
            return self.stored
        return {name: array[self.rows] for name, array in self.stored.items()}

    def _pooled(self, states: Tensor) -> Tensor:
        return pool_members(states, self.begin, "mean")


@dataclass(frozen=True)
class TeacherMaps:
    """Holds stored maps between the tokens of B texts, to be pooled over their runs."""

    values: dict[str, Tensor]  # flat, by name; a text's map is L^2 entries, row-major
    codec: Elementwise
    begin: Tensor  # int64 [B] where they begin
    lengths: Tensor  # int64 [B]
    longest: int
    pooling: MapPooling

    def pooled(self) -> dict[str, Tensor]:
        """Decode and pool attention between runs: float32 [B,G,G] by name."""
        place = torch.arange(self.longest, device=self.lengths.device)
        inside = place < self.lengths[:, None]
        square = inside[:, :, None] & inside[:, None, :]
        row = self.begin[:, None] + place * self.lengths[:, None]
        entries = torch.where(square, row[:, :, None] + place, 0)
        return {
            name: self.pooling.pool(self.codec.from_codes(codes[entries], torch).where(square, 0.0))
            for name, codes in self.values.items()
        }


@dataclass(frozen=True)
class Encoded:
    """Holds the targets of a `Distillation` that the device decodes, by the names of features."""

    normalised: dict[str, TeacherStates]
    states: dict[str, TeacherStates]
    sentences: dict[str, TeacherStates]
    raw_sentences: dict[str, TeacherStates]
    maps: TeacherMaps | None

    def decoded(self) -> dict[str, Any]:
        """Decode everything: the values of `Distillation`'s fields by their names."""
        return {
            "normalised": {name: it.normalised() for name, it in self.normalised.items()},
            "states": {name: it.states() for name, it in self.states.items()},
            "sentences": {name: it.normalised() for name, it in self.sentences.items()},
            "raw_sentences": {name: it.states() for name, it in self.raw_sentences.items()},
            "maps": {} if self.maps is None else self.maps.pooled(),
        }
