"""The commands of a reproduction: each runs once, or all are listed with what they will take."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reproduce.costs import NOTHING, Cost
from harness.processes import in_own_process
from teachonce.support.console import readable

PROGRAMS = {
    "teachonce.teacher_dump.cli": "teacher-dump",
    "teachonce.student_train.cli": "student-train",
    "teachonce.downstream.cli": "downstream",
}


@dataclass(frozen=True)
class Planned:
    """Holds a command that a dry run did not run, and its estimated cost."""

    line: str
    cost: Cost


@dataclass
class Steps:
    """Runs commands, each in its own process and only if its output is missing; `jobs` is the
    number of commands that share the cores. A dry run only lists them, in `planned`."""

    jobs: int = 1
    dry: bool = False
    planned: list[Planned] = field(default_factory=list)

    def run(
        self,
        module: str,
        *words: str | Path,
        done: Callable[[], bool],
        cost: Callable[[], Cost] = lambda: NOTHING,
    ) -> None:
        """Run the `main` of a module with these words unless it is `done`."""
        if done():
            return
        if self.dry:
            line = shlex.join([PROGRAMS[module], *map(str, words)])
            # A command that is planned already would be done by then.
            if all(step.line != line for step in self.planned):
                self.planned.append(Planned(line, cost()))
        else:
            in_own_process(module, *words, jobs=self.jobs)

    def write(self, work: Callable[[], object]) -> None:
        """Write files that the commands read; a dry run writes none."""
        if not self.dry:
            work()


def plan_text(planned: list[Planned], tflops: float) -> str:
    """List commands, each with its estimated cost on a machine with the given TFLOP/s, and the
    sum."""
    lines = []
    for step in planned:
        lines += [f"# {_expected(step.cost, tflops)}", step.line]
    total = sum((step.cost for step in planned), NOTHING)
    lines.append(f"# all {len(planned)} commands: {_expected(total, tflops)}")
    return "\n".join(lines)


def _expected(cost: Cost, tflops: float) -> str:
    hours = cost.flops / (tflops * 1e12) / 3600
    duration = f"{hours:,.1f} hours" if hours >= 0.1 else f"{hours * 60:.1g} minutes"
    return f"about {duration}" + (f", {readable(cost.bytes)}" if cost.bytes else "")
