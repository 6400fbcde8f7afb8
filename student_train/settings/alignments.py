"""The alignments that `--align` chooses from: one entry for each says all that other code asks of
it. The functions stand in `align/strategies.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `student-train --help` lists the alignments and must not wait for them
    from teachonce.align import Alignment, FlatText, Tokens, VocabularyMap


@dataclass(frozen=True)
class Sides:
    """Holds B texts in the teacher's tokens and in the student's own.

    vocabulary: maps the teacher's pieces to the student's.
    max_length: the most tokens of a text that the student reads.
    """

    texts: Sequence[str]
    teacher: Tokens
    student: Tokens
    vocabulary: VocabularyMap
    max_length: int

    @cached_property
    def text(self) -> FlatText:
        """Join the characters of the texts, once for all alignments of a batch."""
        from teachonce.align import FlatText

        return FlatText.of(self.texts)


@dataclass(frozen=True)
class Strategy:
    """Says all that other code asks of one alignment.

    about: what a run is, as `--help` says it.
    align: gives the student's tokens and the runs of both sides. Raises AlignmentError.
    second_input: the student's tokens are not its own. It reads them beside its own.
    predicted: the student piece that a teacher's piece becomes as a target of logits. It is the
        same piece, which not every piece has, or the first piece of its split, which the first
        token of a run predicts.
    pool: how a run's outputs become one where `--pool` does not say.
    pools_logits: the outputs that become one are logits, not the states under them.
    """

    about: str
    align: Callable[[Sides], tuple[Tokens, Alignment]]
    second_input: bool = False
    predicted: Literal["same", "first"] = "same"
    pool: Literal["mean", "sum"] = "mean"
    pools_logits: bool = False


def _span(sides: Sides) -> tuple[Tokens, Alignment]:
    from teachonce.align import align_span

    return sides.student, align_span(sides.text, sides.teacher, sides.student)


def _match(sides: Sides) -> tuple[Tokens, Alignment]:
    from teachonce.align import align_match

    pairs = align_match(sides.text, sides.teacher, sides.student, sides.vocabulary)
    return sides.student, pairs


def _reduce(sides: Sides) -> tuple[Tokens, Alignment]:
    from teachonce.align import align_reduce

    reduced = align_reduce(sides.teacher, sides.vocabulary, sides.max_length)
    return reduced.tokens, reduced.alignment


ALIGNMENTS = {
    "span": Strategy(
        "the smallest runs of tokens that cover the same characters", _span, predicted="first"
    ),
    "match": Strategy("single tokens of the same characters and piece", _match),
    "reduce": Strategy(  # Kolesnikova et al. 2022 sum
        "each teacher token and the student pieces it splits into, which the student reads, too",
        _reduce,
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
