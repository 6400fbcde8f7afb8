"""The alignments that `--align` chooses from: one entry for each. `align.Tokenizations` makes them;
it is not imported here, as `--help` must not wait for NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """Describes one alignment.

    about: what a run is, as `--help` says it.
    second_input: the student reads a second input, made of the teacher's tokens.
    predicted: the student piece that a teacher's piece becomes as a target of logits. It is the
        same piece, which not every piece has, or the first piece of its split, which the first
        token of a run predicts.
    pool: how a run's outputs become one where `--pool` does not say.
    pools_logits: the outputs that become one are logits, not the states under them.
    """

    about: str
    second_input: bool = False
    predicted: Literal["same", "first"] = "same"
    pool: Literal["mean", "sum"] = "mean"
    pools_logits: bool = False


ALIGNMENTS = {
    "span": Strategy(
        "the smallest runs of tokens that cover the same characters", predicted="first"
    ),
    "match": Strategy("single tokens of the same characters and piece"),
    "reduce": Strategy(  # Kolesnikova et al. 2022 sum
        "each teacher token and the student pieces it splits into, which the student reads, too",
        second_input=True,
        pool="sum",
        pools_logits=True,
    ),
}
"""By name, in the order of `--help`."""


def help_text() -> str:
    """List what each alignment pairs, for `--help`."""
    return "; ".join(f"{name}: {strategy.about}" for name, strategy in ALIGNMENTS.items())


def pool_help() -> str:
    """Tell the default of `--pool` for each alignment, for `--help`."""
    summed = [name for name, strategy in ALIGNMENTS.items() if strategy.pool == "sum"]
    return f"sum for {', '.join(summed)}, else mean"
