"""The teacher's states and maps as stored, decoded and pooled on the device that trains: they get
there at a quarter of the size of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from store.format import codecs
from student_train.data.pooling import MapPooling, pool_members


@dataclass(frozen=True)
class TeacherStates:
    """Stored states of J tokens, to be averaged over G runs of them; `rows` None: all of `values`.

    Values, scale, mean and deviation are those of a `HiddenBatch`.
    """

    values: Tensor
    scale: Tensor | None
    mean: Tensor
    deviation: Tensor
    rows: Tensor | None  # int64 [J] of values and scale
    begin: Tensor  # int64 [G] of the J

    def normalised(self) -> Tensor:
        """float32 [G,D]: pooled (state - mean) / deviation."""
        values, scale = self._stored()
        if scale is None:
            return self._pooled((values - self.mean) / self.deviation)
        return self._pooled(decode_scaled(values, scale, len(self.mean)))

    def states(self) -> Tensor:
        """float32 [G,D]: pooled raw states."""
        values, scale = self._stored()
        if scale is None:
            return self._pooled(values)
        decoded = decode_scaled(values, scale, len(self.mean))
        return self._pooled(decoded.mul_(self.deviation).add_(self.mean))

    def _stored(self) -> tuple[Tensor, Tensor | None]:
        if self.rows is None:
            return self.values, self.scale
        return self.values[self.rows], None if self.scale is None else self.scale[self.rows]

    def _pooled(self, states: Tensor) -> Tensor:
        return pool_members(states, self.begin, "mean")


@dataclass(frozen=True)
class TeacherMaps:
    """Stored maps between the tokens of B texts, to be pooled over their runs."""

    values: dict[str, Tensor]  # by name: maps of L^2 entries, row-major, among others
    begin: Tensor  # int64 [B] where they begin
    lengths: Tensor  # int64 [B]
    longest: int
    pooling: MapPooling

    def pooled(self) -> dict[str, Tensor]:
        """float32 [B,G,G] by name: attention between runs."""
        place = torch.arange(self.longest, device=self.lengths.device)
        inside = place < self.lengths[:, None]
        square = inside[:, :, None] & inside[:, None, :]
        row = self.begin[:, None] + place * self.lengths[:, None]
        entries = torch.where(square, row[:, :, None] + place, 0)
        return {
            name: self.pooling.pool(decode_attention(codes[entries]).where(square, 0.0))
            for name, codes in self.values.items()
        }


@dataclass(frozen=True)
class Encoded:
    """What of a `Distillation` is decoded where it is used."""

    normalised: dict[str, TeacherStates]
    states: dict[str, TeacherStates]
    sentences: dict[str, TeacherStates]
    maps: TeacherMaps | None

    def decoded(self) -> dict[str, Any]:
        """Tensors by name: the fields of `Distillation` with these names."""
        return {
            "normalised": {name: it.normalised() for name, it in self.normalised.items()},
            "states": {name: it.states() for name, it in self.states.items()},
            "sentences": {name: it.normalised() for name, it in self.sentences.items()},
            "maps": {} if self.maps is None else self.maps.pooled(),
        }


def decode_scaled(values: Tensor, scale: Tensor, width: int) -> Tensor:
    """`store.codecs.decode_scaled` on the device of its arguments, with the same result."""
    if values.dtype == torch.int8:
        return values.float() * scale.float()[:, None]
    codes = torch.empty((*values.shape, 2), device=values.device)
    signed = values.view(torch.int8)
    codes[:, :, 0] = (signed << 4) >> 4
    codes[:, :, 1] = signed >> 4
    group = next(g for g in codecs.GROUPS if -(-width // g) == scale.shape[1])
    scales = scale.float().repeat_interleave(group, dim=1)[:, :width]
    return codes.flatten(1)[:, :width].mul_(scales)


def decode_attention(codes: Tensor) -> Tensor:
    """`store.codecs.decode_attention` on the device of its argument, with the same result but for
    the rounding of a GPU's division."""
    return codes if codes.dtype == torch.float32 else (codes.float() / 255).square_()
