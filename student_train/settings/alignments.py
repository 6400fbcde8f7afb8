"""The alignments of `--align`: one entry for each. `align.Tokenizations` computes them."""

# `align` is not imported here: `--help` must not wait for NumPy.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """Describes one alignment.

    about: what a run is, for `--help`.
    second_input: the student reads a second input, made of the teacher's tokens.
    predicted: the student piece to which the logit of a teacher piece is mapped. `same`: the
        identical piece; teacher pieces without one have no target. `first`: the first student
        piece of its split, which the first token of a run predicts.
    pool: how the outputs of a run are pooled if `--pool` is not given.
    pools_logits: pool logits, instead of the hidden states under them.
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
        "each teacher token with the student pieces that it splits into, which the student reads"
        " as a second input",
        second_input=True,
        pool="sum",
        # As published: the logits of a token's pieces are pooled, not the states before the head.
        pools_logits=True,
    ),
    "bytes": Strategy(
        "the smallest runs of tokens that cover the same bytes, white space included",
        predicted="first",
    ),
}
"""By name, in the order of `--help`."""


def help_text() -> str:
    """Describe every alignment, for `--help`."""
    return "; ".join(f"{name}: {strategy.about}" for name, strategy in ALIGNMENTS.items())


def pool_help() -> str:
    """Describe the default of `--pool`, for `--help`."""
    summed = [name for name, strategy in ALIGNMENTS.items() if strategy.pool == "sum"]
    return f"sum for {', '.join(summed)}, else mean"
