"""Parses the values of a dump's options as they are typed on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from teachonce.support.environment import torchrun_number
from teachonce.support.errors import UserError
from teachonce.support.parsing import AS_TEXT, local_path, whole_number

PART_TOKENS = 1 << 17  # a kill loses at most one part; a part is in memory until it is written
DEFAULT_CORPUS = "python-docs"
DEFAULT_MAX_LENGTH = 256
# 64 itself was not measured. Students of `topk:160` are as good as students of the head's input
# (4.86 and 4.84 nats per token); with `topk:16` they are worse (5.15), at 60 bytes per token
# (RESULTS, "Quality by tier").
DEFAULT_LOGITS = "topk:64"
AUTO = "auto"
# Heads of whole texts: states and maps of tokens are stored with them only on request.
TEXT_HEADS = ("embedding", "score")
MAX_DRAWS = 2**16 - 1  # for one token: a store counts them in uint16


class ProcessShard(NamedTuple):
    """Holds the place of one process among the processes that write one store together.

    place: 0..size - 1, like torchrun's RANK. size: the number of processes.
    """

    place: int
    size: int


def shard_of(spec: str | None) -> ProcessShard | None:
    """Return the shard of this process: from `--shard`, else from torchrun's RANK and WORLD_SIZE.

    Returns None if this is the only process. Raises UserError if `--shard` is not i/n, or if a
    variable is not a number.
    """
    if spec is None:
        size = torchrun_number("WORLD_SIZE", 1)
        return ProcessShard(torchrun_number("RANK", 0), size) if size > 1 else None
    index, processes = (whole_number(word) for word in spec.partition("/")[::2])
    if index is not None and processes is not None and index < processes:
        return ProcessShard(index, processes)
    raise UserError(
        f"--shard {spec}: expected i/n, where i is one of the numbers 0 to n - 1, such as 0/4"
    )


def tier_and_size(spec: str) -> tuple[str, int]:
    """Parse `--logits` into tier and size: K of `topk:K`, DRAWS of `sample:DRAWS`, otherwise 0.

    Raises UserError for any other form. Whether the size fits the teacher is checked later.
    """
    tier, _, number = spec.partition(":")
    if spec in ("none", "head"):
        return spec, 0
    if tier in ("topk", "sample") and (size := whole_number(number)):
        if tier == "sample" and size > MAX_DRAWS:
            raise UserError(f"--logits {spec}: at most {MAX_DRAWS} draws per token; request fewer")
        return tier, size
    raise UserError(f"--logits {spec}: expected topk:K, sample:DRAWS (at least 1), head or none")


def place_of(word: str) -> Path | str:
    """Return `--out` as a Path, or as str if it is a URL."""
    return word if "://" in word else local_path(word, AS_TEXT)


def read_sources(words: tuple[str, ...] | str) -> tuple[str, ...]:
    """Split the values of `--corpus` at their commas. Raises UserError if all are empty."""
    values = (words,) if isinstance(words, str) else words
    found = tuple(part for value in values for part in value.split(",") if part)
    if values and not found:  # else the default corpus would be read
        raise UserError("--corpus: is empty; give a source, or leave it out")
    return found
