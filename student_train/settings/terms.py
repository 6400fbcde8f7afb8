"""The terms of a student's loss: parses the weights of `--loss` and the alignments of `--align`,
which `align.Tokenizations` computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from teachonce.student_train.losses.registry import find, loss_names
from teachonce.support.errors import UserError, suggest

# Hidden states with weight 30 (the best of 3, 10 and 30): 4.42 nats a token for a BERT of 128x2x2,
# where masked-LM training alone has 6.02. `kl=1` in addition costs .2 nats, for an agreement with
# the teacher of .48 instead of .46 (RESULTS, "Distillation helps").
DEFAULT_LOSS: Mapping[str, float] = {"mlm": 1.0, "hidden": 30.0}
# For text vectors. `similarity=30` is no better (RESULTS, "Students of sentence embeddings").
VECTOR_LOSS: Mapping[str, float] = {"embedding": 1.0, "similarity": 10.0}
# 2.070 bits per byte after 2M tokens (three seeds, cut out of the teacher), 2.079 without
# `next-inside`, and 2.142 for `next` alone. Hidden states in addition do not help (RESULTS,
# "Decoder students"): `next=1,hidden=0.3` has 2.148.
NEXT_LOSS: Mapping[str, float] = {"next": 0.34, "next-inside": 0.33, "kl-next": 0.33, "alm": 0.33}
# 2.083 bits per byte (one seed), 2.099 without `next-inside`.
NEXT_PIECES_LOSS: Mapping[str, float] = {"next": 0.5, "next-inside": 0.5, "kl-next": 0.5}
NEXT_STATES_LOSS: Mapping[str, float] = {"next": 1.0, "hidden": 1.0}
NEXT_TEMPERATURE = 1.0
# Added to VECTOR_LOSS if states are stored: rank correlation .695 instead of .681 at equal steps;
# weight 10 was no better.
STATES_LOSS: Mapping[str, float] = {"hidden": 3.0}
# Added to `kl` and `ce` of a task: taggers from few labels have entity F1 .28 instead of .22, and
# no classifier was worse (RESULTS, "Our recipe against those of the sources").
TASK_STATES_LOSS: Mapping[str, float] = {"hidden": 30.0}
# For a teacher of scores or other numbers.
SCORE_LOSS: Mapping[str, float] = {"logit": 1.0, "margin": 1.0}
# Batches of 64 texts change no figure (RESULTS, "Students of sentence embeddings").
VECTOR_TEXTS = 128
"""The default of `--batch-texts` for losses of text vectors."""
# 128 numbers for each of 20,000 pieces have an STS mean of .701 and nDCG@10 of .360. 512 numbers
# for each of 5,000 have .682 and .348, and more bytes (RESULTS, "Students of sentence embeddings").
STATIC_VOCABULARY = "20k"
"""The default of `--vocab` for a static student."""
# For masked LMs `reduce` reaches 4.39 nats instead of 4.42 but takes 1.5 times as long per step;
# `match` reaches 4.47.
DEFAULT_ALIGNMENT = "span"


def parse_losses(words: str | tuple[str, ...]) -> dict[str, float]:
    """Parse `name=weight` words, repeated or in comma-separated lists, into weights by name.

    A name without a weight has weight 1. Raises UserError for a weight that is not a number, and
    for a loss that is given twice.
    """
    weights: dict[str, float] = {}
    every = (words,) if isinstance(words, str) else words
    for word in (item.strip() for value in every for item in value.split(",")):
        name, equals, weight = word.partition("=")
        try:
            number = float(weight if equals else 1)
        except ValueError:
            raise UserError(f"--loss {word}: expected NAME=WEIGHT, such as kl=2") from None
        if name in weights:
            raise UserError(f"--loss {word}: {name} is given twice; give each loss one weight")
        weights[name] = number
    return weights


def check_losses(loss: Any) -> None:
    """Check the weights of losses. Raises UserError for an unknown loss or a weight of 0 or
    less."""
    if not isinstance(loss, Mapping) or not loss:
        raise UserError("--loss: expected one or more losses with weights, such as mlm=1,hidden=30")
    for name, weight in loss.items():
        if not isinstance(name, str):
            raise UserError(
                f"--loss: expected names with weights, such as {{'my_module:LOSS': 1}}, got"
                f" {type(name).__name__}"
            )
        number = isinstance(weight, int | float)
        if not number or not 0 < weight < math.inf:
            shown = f"{weight:g}" if number else repr(weight)
            raise UserError(f"--loss {name}={shown}: expected a finite weight above 0")
        if not find(name):
            near = suggest(name, names := loss_names())
            raise UserError(
                f"--loss {name}: unknown; {near}expected one of {', '.join(names)}, or"
                " MODULE:OBJECT, a Loss of your own"
            )


@dataclass(frozen=True)
class Strategy:
    """Describes one alignment.

    about: what a run is, for `--help`.
    second_input: whether the student reads a second input, made of the teacher's tokens.
    predicted: the student piece to which the logit of a teacher piece is mapped. `same`: the
        identical piece; teacher pieces without one have no target. `first`: the first student
        piece of its split, which the first token of a run predicts.
    pool: how the outputs of a run are pooled if `--pool` is not given.
    pools_logits: whether to pool logits instead of the hidden states that the head reads.
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
"""The alignments by name, in the order of `--help`."""


def alignment_help() -> str:
    """Describe every alignment, for `--help`."""
    return "; ".join(f"{name}: {strategy.about}" for name, strategy in ALIGNMENTS.items())


def pool_help() -> str:
    """Describe the default of `--pool`, for `--help`."""
    summed = [name for name, strategy in ALIGNMENTS.items() if strategy.pool == "sum"]
    return f"sum for {', '.join(summed)}, else mean"


@dataclass(frozen=True)
class LossAlignments:
    """Holds the alignments that were given: `own` by loss, and `bare` for all other losses ("" if
    it was not given)."""

    bare: str
    own: Mapping[str, str]

    @property
    def others(self) -> str:
        """Return the alignment of the losses that are not in `own`."""
        return self.bare or DEFAULT_ALIGNMENT

    def of(self, loss: str) -> str:
        """Return the name of a loss's alignment."""
        return self.own.get(loss, self.others)


def parse_alignments(words: str | None) -> LossAlignments:
    """Parse `match`, `kl=match,hidden=reduce` or `reduce,kl=match`; None if nothing was given.

    Raises UserError for an unknown loss or alignment, for a loss that is given twice, and for a
    loss without a teacher's side.
    """
    by_loss, bare = dict[str, str](), list[str]()
    for word in () if words is None else map(str.strip, words.split(",")):
        name, equals, alignment = word.rpartition("=")
        if alignment not in ALIGNMENTS:
            raise UserError(
                f"--align {word}: expected one of {', '.join(ALIGNMENTS)}, or for a single loss"
                " LOSS=ALIGNMENT, such as kl=match"
            )
        if not equals:
            bare.append(alignment)
            continue
        if not (losses := find(name)):
            names = ", ".join(loss_names())
            raise UserError(f"--align {word}: no loss {name!r}; expected one of {names}")
        if all(loss.without_teacher for loss in losses):
            raise UserError(
                f"--align {word}: {name} compares the student with its own text, not with the"
                " teacher, and has no alignment; leave it out"
            )
        if name in by_loss:
            raise UserError(f"--align {word}: {name} is given twice; give each loss one alignment")
        by_loss[name] = alignment
    if len(bare) > 1:
        raise UserError(
            f"--align {words}: {' and '.join(bare)} cannot both apply to all losses; give one,"
            " and others as LOSS=ALIGNMENT, such as kl=match"
        )
    return LossAlignments(bare[0] if bare else "", by_loss)
