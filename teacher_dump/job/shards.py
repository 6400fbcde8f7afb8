"""Which of several processes that make one store this one is: `--shard`, or what torchrun tells."""

from __future__ import annotations

import os
from typing import NamedTuple

from teachonce.support.errors import UserError


class Shard(NamedTuple):
    """Number `place`, from 0, of the `size` processes that make one store."""

    place: int
    size: int

    @staticmethod
    def read(spec: str) -> Shard:
        """Read `i/n`. Raises UserError for anything else."""
        place, _, size = spec.partition("/")
        if place.isdecimal() and size.isdecimal() and int(place) < int(size):
            return Shard(int(place), int(size))
        raise UserError(
            f"--shard {spec}: expected i/n, where i is one of the numbers 0 to n - 1, as 0/4"
        )


def shard_of(spec: str | None) -> Shard | None:
    """Return which of the processes this is: what `--shard` says, else what torchrun has told in
    the environment; None for the only one."""
    if spec is not None:
        return Shard.read(spec)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return Shard(int(os.environ.get("RANK", "0")), size) if size > 1 else None
