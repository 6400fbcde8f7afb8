"""`--downstream FILE.toml`: each student fine-tuned and scored by `downstream`, in a process of its
own."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.errors import UserError
from support.options import flag_of
from support.toml_file import read_toml

FOLDER, SCORED = "scores", "scores.json"
DOWNSTREAM = (sys.executable, "-c", "from downstream.cli import main; main()")
OF_FILES = ("train", "dev", "test", "unlabelled")
OWN = ("model", "out", "json")
"""Options of `downstream` that the sweep gives itself."""


@dataclass(frozen=True)
class Task:
    """A run of `downstream` on each student: its name in the table, and its command line."""

    name: str
    words: tuple[str, ...]

    def folder(self, sweep: Path, model: str) -> Path:
        """Return where the scores of a model go; other settings of the task have another folder."""
        digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()
        return sweep / FOLDER / model / f"{self.name}-{digest[:6]}"


@dataclass(frozen=True)
class Plan:
    """What is scored: the tasks of every student, and the `models`, by name, that students are held
    against."""

    tasks: tuple[Task, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)


def read_plan(path: Path) -> Plan:
    """Read the tables [tasks.NAME] of a file, whose keys are the options of `downstream`, and
    [models], which has a checkpoint for each name.

    Raises UserError, naming file and task, for a key that is no option, and for a file to train or
    test on that is not there.
    """
    content = read_toml(path, "--downstream", "list of tasks")
    tasks, models = content.pop("tasks", None), content.pop("models", {})
    if content or not isinstance(tasks, dict) or not tasks:
        raise UserError(f"{path}: expected tables [tasks.NAME], and [models] or nothing else")
    if not isinstance(models, dict) or not all(isinstance(m, str) for m in models.values()):
        raise UserError(f'{path}: models: expected a table of folders, such as teacher = "bert"')
    for name in models:
        _check_name(name, f"{path}, models")
    return Plan(
        tuple(_task(name, table, f"{path}, task {name}") for name, table in tasks.items()), models
    )


def _check_name(name: str, where: str) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{where}: {name!r}: expected a name of letters, digits, _, - and .")


def _task(name: str, table: Any, where: str) -> Task:
    _check_name(name, where)
    if not isinstance(table, dict) or not isinstance(table.get("task"), str):
        raise UserError(f'{where}: expected task = "classify", or another task of downstream')
    words = list[str]()
    for key, value in table.items():
        flag = flag_of(key)
        if flag not in _options() or key in OWN:
            raise UserError(f"{where}: {key} is no option here; see downstream --help")
        for each in value if isinstance(value, list) else [value]:
            if key in OF_FILES and not Path(str(each)).exists():
                raise UserError(f"{where}: {key} {each}: there is no such file")
            if each is not False:
                words += [flag] if each is True else [flag, str(each)]
    return Task(name, tuple(words))


@cache
def _options() -> frozenset[str]:
    """Ask `downstream` for its options: this package stands below it and may not import it."""
    said = subprocess.run([*DOWNSTREAM, "--help"], capture_output=True, text=True, check=True)
    return frozenset(re.findall(r"--[a-z][a-z-]*", said.stdout))


def score(
    task: Task, model: str, name: str, sweep: Path, say: Callable[[str], object]
) -> Mapping[str, float]:
    """Score a model, if it has no scores yet; return its main figures by name, shares in percent.

    Raises UserError with the last line of `downstream` where it fails.
    """
    out = task.folder(sweep, name)
    file = out / SCORED
    if not file.exists():
        say(f"scores    {name}: {task.name}")
        words = [*DOWNSTREAM, *task.words, "--model", model, "--out", str(out)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            last = lines[-1].removeprefix("Error: ")
            raise UserError(f"task {task.name}: {last} (downstream ended with {done.returncode})")
    return _figures(json.loads(file.read_text("utf-8")))


def _figures(scores: Mapping[str, Any]) -> dict[str, float]:
    if "models" in scores:  # a measurement of speed
        (row,) = scores["models"]
        found = {"disk_bytes": row["disk_bytes"]}
        for device in scores["devices"]:
            found |= {f"{device} {name}": row[device][name] for name in ("sentence_ms", "batch_ms")}
        return {name: value for name, value in found.items() if value is not None}
    split = next(iter([each for each in scores["mean"] if each == "test"] or scores["mean"]))
    scale, several = scores.get("scale", 100), len(scores["seeds"]) > 1
    found = dict[str, float]()
    for heading, name in scores["measures"].items():
        found[heading] = scale * scores["mean"][split][name]
        if several:
            found[f"{heading} deviation"] = scale * scores["deviation"][split][name]
    return found
