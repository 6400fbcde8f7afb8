"""Alignments of tokens, and the one error of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]
Booleans = NDArray[np.bool_]


class AlignmentError(ValueError):
    """Says in one line what is wrong with input that cannot be aligned, and where."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """G pairs of half-open runs of flat token numbers, in the order of the text.

    teacher, student: int32 [G, 2]; pair g says that teacher tokens teacher[g, 0] ... teacher[g, 1]
    - 1 stand for the same characters as student tokens student[g, 0] ... student[g, 1] - 1. No run
    is empty, runs of one side are disjoint and increasing, and no run crosses a sequence.
    """

    teacher: NDArray[np.int32]
    student: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name, runs in (("teacher", self.teacher), ("student", self.student)):
            if runs.ndim != 2 or runs.shape[1] != 2 or runs.dtype != np.int32:
                raise AlignmentError(
                    f"{name} runs: expected int32 [G, 2], got {runs.dtype} {list(runs.shape)}"
                )
        if len(self.teacher) != len(self.student):
            raise AlignmentError(
                f"runs: {len(self.teacher)} of the teacher, {len(self.student)} of the student"
            )

    def __len__(self) -> int:
        return len(self.teacher)

    def __repr__(self) -> str:
        if len(self) > 8:
            return f"Alignment({len(self)} pairs)"
        return f"Alignment(teacher={self.teacher.tolist()}, student={self.student.tolist()})"

    def swap(self) -> Alignment:
        """Return these pairs with the sides exchanged."""
        return Alignment(self.student, self.teacher)
