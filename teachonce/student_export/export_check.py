"""What an export is compared by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teachonce.student_export.formats import Runner


@dataclass(frozen=True)
class ExportCheck:
    """A measure of how closely an export reproduces its student.

    measure: what is measured, in words for messages and the model card.
    share: takes an export's `Runner`, returns its score as a share of the student's, or the
    agreement of their outputs; 1 is full agreement.
    score: takes a `Runner`, returns its task score; None if no task is scored.
    unit: of `score`; "" for a share, which is printed in percent.
    texts: whose tokens are compared as well, if a format has a tokenizer of its own.
    """

    measure: str
    share: Callable[[Runner], float]
    score: Callable[[Runner], float] | None = None
    unit: str = ""
    texts: Sequence[str] = ()
