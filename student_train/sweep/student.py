"""One student of a sweep: trained, then scored."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teachonce.student_train.sweep.runs import Pruned
from teachonce.student_train.sweep.scores import Task, score
from teachonce.student_train.sweep.table import SCORES
from teachonce.support.errors import UserError, first_line, of_path
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from teachonce.store import FeatureStore
    from teachonce.student_train.output.run import Prepared
    from teachonce.student_train.settings.options import TrainOptions

Say = Callable[[str], object]
Validated = Callable[[int, dict[str, float]], object]


@dataclass(frozen=True)
class Work:
    """What is done for a student: a training, then tasks."""

    options: TrainOptions
    tasks: tuple[Task, ...]

    def train(
        self,
        stores: list[FeatureStore],
        prepared: Prepared | None,
        on_validation: Validated | None,
        say: Say,
    ) -> dict[str, Any]:
        """Train the student, or go on with it, where it is not finished; return its result."""
        from teachonce.student_train.output.report import read_report
        from teachonce.student_train.output.run import train_student
        from teachonce.training.checkpoint import newest_checkpoint, remove_checkpoints

        out = self.options.out_folder()

        def kept() -> str:
            return f"{out}: {newest_checkpoint(out / 'checkpoints')}; the same command goes on"

        report = read_report(out)
        if report is None or "result" not in report:
            try:
                with stoppable(kept):
                    report = train_student(
                        self.options,
                        stores,
                        resume=report is not None,
                        say=say,
                        prepared=prepared,
                        on_validation=on_validation,
                    )
            except Pruned:
                remove_checkpoints(out / "checkpoints")  # nobody goes on with it
                raise
        return dict(report["result"])

    def score(self, say: Say) -> Mapping[str, Mapping[str, float]]:
        """Score the finished student on all tasks; raises UserError where one fails."""
        out = self.options.out_folder()
        return {t.name: score(t, str(out), out.name, out.parent, say) for t in self.tasks}


def reason(error: Exception) -> str:
    """Tell in a line why a student failed; of an error that nobody foresaw, where it arose."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        return of_path(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {first_line(error)}"
    return f"{told} ({where.filename}, line {where.lineno})"


def finish(
    work: Work,
    stores: list[FeatureStore],
    prepared: Prepared | None,
    on_validation: Validated | None,
    say: Say,
) -> tuple[str, Any, str]:
    """Do the work; return the state of the run, its result, and its problem.

    A student whose scores fail is finished all the same. Raises Stopped.
    """
    try:
        result = work.train(stores, prepared, on_validation, say)
    except Pruned as pruned:
        return "pruned", {}, str(pruned)
    except Exception as error:  # other students go on
        return "failed", {}, reason(error)
    try:
        scores = work.score(say)
    except Exception as error:
        return "finished", result, f"its scoring failed: {reason(error)}"
    return "finished", {**result, SCORES: scores} if scores else result, ""
