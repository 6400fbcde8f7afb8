"""Fine-tune and score students by the command `downstream` (--downstream FILE.toml)."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teachonce.student_train.output.ranking import DEVIATION, QUARTILES, SCORED
from teachonce.support.errors import UserError
from teachonce.support.options import command_words
from teachonce.support.parsing import read_json, read_toml, schema_violation

FILE = "scores.json"
# `downstream` runs in processes of its own: student_train may not import it (ARCHITECTURE.md,
# Layers).
DOWNSTREAM = (sys.executable, "-c", "from teachonce.downstream.cli import main; main()")
CHECK = (sys.executable, "-c", "from teachonce.downstream.early_checks import main; main()")


@dataclass(frozen=True)
class ScoringTask:
    """Describes a task on which `downstream` scores each student.

    name: its name in the table. words: the arguments of `downstream`.
    """

    name: str
    words: tuple[str, ...]

    def folder(self, sweep: Path, model: str) -> Path:
        """Return the folder of a model's scores; it depends on the settings of the task."""
        digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()
        return sweep / SCORED / model / f"{self.name}-{digest[:6]}"


@dataclass(frozen=True)
class ScoringPlan:
    """Lists the tasks on which to score each student, and other models to compare with, by name."""

    tasks: tuple[ScoringTask, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)


def read_plan(path: Path) -> ScoringPlan:
    """Read the tables [tasks.NAME], with options of `downstream`, and [models], NAME = checkpoint.

    Raises UserError, naming file, table and key, for options that `downstream` refuses.
    """
    content = read_toml(path)
    tasks, models = content.pop("tasks", None), content.pop("models", {})
    if content or not isinstance(tasks, dict) or not tasks:
        raise UserError(f"{path}: expected tables [tasks.NAME] and optionally [models], no others")
    if not isinstance(models, dict) or not all(isinstance(m, str) for m in models.values()):
        raise UserError(f'{path}: models: expected a table of folders, such as teacher = "bert"')
    for table, names in (("tasks", tasks), ("models", models)):
        for name in names:
            if not re.fullmatch(r"[\w.-]+", name):
                expected = "expected a name of letters, digits, _, - and ."
                raise UserError(f"{path}: [{table}] {name!r}: {expected}")
    if problem := _refused(tasks, models):
        raise UserError(f"{path}: {problem}")
    return ScoringPlan(
        tuple(ScoringTask(name, tuple(command_words(t))) for name, t in tasks.items()), models
    )


def _refused(tasks: Mapping[str, Any], models: Mapping[str, str]) -> str:
    """Check the tables with the checks of `downstream`; return its error message, or ""."""
    # TOML has dates, which JSON lacks: `downstream` refuses them as texts.
    tables = json.dumps({"tasks": tasks, "models": models}, default=str)
    done = subprocess.run(CHECK, input=tables, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--downstream: its tasks and models cannot be checked: {_last_line(done)}")
    # Only the last line, because libraries may print others before it.
    return str(json.loads(done.stdout.splitlines()[-1]))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    return lines[-1].removeprefix("Error: ")


def score(
    task: ScoringTask, model: str, name: str, sweep: Path, say: Callable[[str], object]
) -> Mapping[str, float]:
    """Score a model unless its scores exist; return its main figures by name, shares in percent.

    Raises UserError with the last line of `downstream` if it fails.
    """
    out = task.folder(sweep, name)
    file = out / FILE
    if not file.exists():
        say(f"scores    {name}: {task.name}")
        command = [*DOWNSTREAM, *task.words, "--model", model, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = _last_line(done)
            raise UserError(
                f"task {task.name}: {last} (downstream exited with code {done.returncode})"
            )
    return _figures(read_json(file, SHAPE), file)


def check_scored(task: ScoringTask, model: str, name: str, sweep: Path) -> None:
    """Raise UserError if the scores of a reference model `name` are of another model."""
    folder, scored = task.folder(sweep, name), model
    with suppress(OSError, ValueError, TypeError, LookupError):  # none yet, or `score` reports it
        scores = json.loads((folder / FILE).read_text("utf-8"))
        scored = str(scores["models"][0]["model"] if "models" in scores else scores["model"])
    if scored != model:
        raise UserError(
            f"{folder}: has the scores of {scored}, and [models] {name} is {model} now; give it"
            " another name, or remove this folder"
        )


MEANS = {"*": {"*": float}}
SHAPE = {
    "models?": [dict],
    "devices?": [str],
    "mean?": MEANS,
    "deviation?": MEANS,
    "seeds?": [object],
    "measures?": {"*": str},
    "scale?": float,
}
"""Types in scores.json of `downstream`: for a task, or for `--task speed`."""


def _figures(scores: Mapping[str, Any], file: Path) -> dict[str, float]:
    try:
        figures = _main_figures(scores)
        problem = schema_violation(figures, {"*": float})
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise UserError(f"{file} is damaged ({problem}); remove it to score again")
    return figures


def _main_figures(scores: Mapping[str, Any]) -> dict[str, float]:
    if "models" in scores:  # a measurement of speed
        (row,) = scores["models"]
        figures = {"disk_bytes": row["disk_bytes"]}
        for device in scores["devices"]:
            for name in ("sentence_ms", "batch_ms"):
                figures[f"{device} {name}"] = row[device][name]
                quartiles = row[device][f"{name}_quartiles"]
                figures |= {
                    f"{device} {name} {which}": time
                    for which, time in zip(QUARTILES, quartiles, strict=True)
                }
        return figures
    split = next(iter([s for s in scores["mean"] if s == "test"] or scores["mean"]))
    scale, several = scores["scale"], len(scores["seeds"]) > 1
    figures = dict[str, float]()
    for heading, name in scores["measures"].items():
        figures[heading] = scale * scores["mean"][split][name]
        if several:
            figures[f"{heading} {DEVIATION}"] = scale * scores["deviation"][split][name]
    return figures
