"""The measure by which an export is compared with its student."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teachonce.student_export.formats import Runner


@dataclass(frozen=True)
class ExportCheck:
    """A measure of how closely an export reproduces its student.

    measure: what is measured, in words for messages and the model card.
    share: given an export's `Runner`, returns its score as a share of the student's, or the
        agreement of their outputs; 1 is full agreement.
    score: given a `Runner`, returns its task score; None if no task is scored.
    own: the student's own score; None if no task is scored.
    unit: of `score`; "" for a share, which is printed in percent.
    texts: texts whose token ids are also compared, if a format has a tokenizer of its own.
    """

    measure: str
    share: Callable[[Runner], float]
    score: Callable[[Runner], float] | None = None
    own: float | None = None
    unit: str = ""
    texts: Sequence[str] = ()
