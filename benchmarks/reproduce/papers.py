"""All papers by name, and which of them `all` and `best` run."""

from __future__ import annotations

from benchmarks.reproduce.masked_lms import MLM_SOURCES
from benchmarks.reproduce.task_teachers import TASK_SOURCES

SOURCES = MLM_SOURCES | TASK_SOURCES
"""By the name that the command knows."""

ALL = {name: source for name, source in SOURCES.items() if name != "mukherjee-500"}
"""The papers that `all` and `best` run: every task once, in less than two hours on 2 cores."""

BEST = (
    "settings, data and steps of each source. Ours: masked LMs by the default of `student-train`"
    " (`--loss mlm=1,hidden=30 --align span --init auto`), which came out best by held-out loss in"
    " `benchmarks.quality.distillation_helps`; students of a task by its default there with"
    " the same hidden"
    " states (`--loss ce=1,kl=1,hidden=30`), in one stage as long as all of the source's together."
)
"""Settings of the comparison with our recipe, as its section tells them."""
