"""Runs of tokens as segment operations: one vector or one row of attention for each run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from teachonce.support.arrays import Array, begins, ranges


@dataclass(frozen=True)
class Runs:
    """Holds G runs of flat tokens. Run g has the tokens `member[begin[g]:begin[g + 1]]`."""

    member: Tensor  # int64 [J]
    begin: Tensor  # int64 [G]

    @classmethod
    def of(cls, runs: Array) -> Runs:
        """Make runs of half-open runs [G,2]."""
        lengths = (runs[:, 1] - runs[:, 0]).astype(np.int64)
        member = ranges(runs[:, 0].astype(np.int64), lengths)
        return cls(torch.from_numpy(member), torch.from_numpy(begins(lengths)))

    def chosen(self, where: Tensor) -> Runs:
        """Keep the runs at which bool [G] is true."""
        ends = torch.cat([self.begin[1:], self.begin.new_tensor([len(self.member)])])
        lengths = ends - self.begin
        kept = lengths[where]
        return Runs(self.member[torch.repeat_interleave(where, lengths)], kept.cumsum(0) - kept)

    def pool(self, values: Tensor, how: str) -> Tensor:
        """Take the sum or mean [G,D] of flat token values [N,D] over each run.

        Of the ways that torch has, `embedding_bag` is the fastest, forward and backward.
        """
        return functional.embedding_bag(self.member, values, self.begin, mode=how)

    def pool_members(self, values: Tensor, how: str) -> Tensor:
        """Take the sum or mean [G,D] over each run of values [J,D] of the members alone, in their
        order."""
        return pool_members(values, self.begin, how)


def pool_members(values: Tensor, begin: Tensor, how: str) -> Tensor:
    """Take the sum or mean [G,D] of values [J,D] over G runs, which follow one another from `begin`
    [G]."""
    members = torch.arange(len(values), device=values.device)
    return functional.embedding_bag(members, values, begin, mode=how)


@dataclass(frozen=True)
class MapPooling:
    """Turns attention between tokens into attention between runs: mean over the asking tokens, sum
    over the attended ones.

    Then a row over all runs still holds at most the probability of the row over all tokens.
    """

    asking: Tensor  # float32 [B,G,L]
    attended: Tensor  # float32 [B,G,L]
    present: Tensor  # bool [B,G]

    @classmethod
    def of(cls, runs: Array, start: Array) -> MapPooling:
        """Make the pooling of half-open runs [G,2] of flat tokens whose sequences begin at `start`
        [B+1]."""
        sequence = np.searchsorted(start, runs[:, 0], side="right") - 1
        counts = np.bincount(sequence, minlength=len(start) - 1)
        place = ranges(np.zeros_like(counts), counts)
        longest = int(np.diff(start).max())
        attended = np.zeros(
            (len(start) - 1, max(1, int(counts.max(initial=0))), longest), np.float32
        )
        lengths = runs[:, 1] - runs[:, 0]
        column = ranges(runs[:, 0] - start[sequence], lengths)
        attended[np.repeat(sequence, lengths), np.repeat(place, lengths), column] = 1
        total = attended.sum(axis=2, keepdims=True)
        asking = attended / np.maximum(total, 1)
        return cls(*map(torch.from_numpy, (asking, attended, total[:, :, 0] > 0)))

    def pool(self, maps: Tensor) -> Tensor:
        """Turn maps [B,L,L] between tokens into maps [B,G,G] between runs."""
        return self.asking.to(maps.dtype) @ maps @ self.attended.to(maps.dtype).transpose(1, 2)
