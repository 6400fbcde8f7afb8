"""The runs of a sweep: settings, states and validations, and runs.json, which lists them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from teachonce.student_train.output.ranking import SCORES, SWEEP, Row, ranked
from teachonce.student_train.output.report import read_record
from teachonce.student_train.sweep.space import Space, space_record
from teachonce.student_train.sweep.table import CSV, write_csv
from teachonce.support import files
from teachonce.support.console import counted
from teachonce.support.differences import differences
from teachonce.support.errors import UserError
from teachonce.support.parsing import read_small, schema_violation

if TYPE_CHECKING:
    from teachonce.student_train.settings.options import TrainOptions

RUNS, METRICS = "runs.json", "metrics.jsonl"
MOST_METRICS = 1 << 30  # bytes; a larger file is refused before it fills the memory
State = Literal["waiting", "running", "finished", "pruned", "failed"]


class Pruned(Exception):
    """Raised if a trial was stopped at a validation, because others were better."""


@dataclass
class Run:
    """Describes a student of a sweep. `settings` are the varied settings, as they are printed."""

    number: int
    settings: Mapping[str, str]
    options: TrainOptions
    state: State = "waiting"
    problem: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)  # what a search drew
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.options.out_folder()

    @property
    def summary(self) -> str:
        return ", ".join(f"{n} {v}" for n, v in self.settings.items()) or self.folder.name

    def row(self) -> Row:
        return {**self.settings, "folder": self.folder.name, **self.result}


class SweepRuns:
    """Stores the runs of a sweep and writes runs.json, sweep.json and sweep.csv as they change."""

    def __init__(self, folder: Path, space: Space, varied: Sequence[str], searched: bool) -> None:
        """Read the runs.json of an earlier command. Raises UserError if its ranges differ."""
        self.folder, self.varied, self.runs = folder, varied, list[Run]()
        # As it is read back from the file, where a tuple is a list.
        self.space = json.loads(json.dumps(space_record(space) if searched else None))
        before = read_runs(folder) or {"space": self.space, "runs": []}
        self.earlier: list[dict[str, Any]] = before["runs"]
        # Scores of other models, by name and task.
        self.references: dict[str, Any] = before.get("references", {})
        if before["space"] != self.space:
            other = "; ".join(
                f"{key or 'what is searched'} was {old}, now {new}"
                for key, old, new in differences(before["space"], self.space)
            )
            raise UserError(
                f"{folder}: has a sweep of other ranges ({other}); give the earlier ranges, or"
                " another --out"
            )

    def check_retained(self) -> None:
        """Raise UserError if this command leaves out students of an earlier command's table."""
        # The hash at the end of a name identifies a student; the rest is for people.
        hashes = {run.folder.name.rpartition("-")[2] for run in self.runs}
        lost = [
            run["folder"]
            for run in self.earlier
            if run["state"] == "finished" and run["folder"].rpartition("-")[2] not in hashes
        ]
        if lost:
            raise UserError(
                f"{self.folder}: its table has {counted(len(lost), 'student')} with other settings,"
                f" such as {lost[0]}, which would be lost; give another --out, or add their"
                " settings to this sweep"
            )

    def add(self, run: Run) -> Run:
        self.runs.append(run)
        return run

    def finished(self) -> list[Row]:
        return [run.row() for run in self.runs if run.state == "finished"]

    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.problem and run.state != "pruned"]

    def write(self) -> None:
        """Write the states of all runs. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "folder": run.folder.name,
                "settings": dict(run.settings),
                "params": dict(run.params),
                "state": run.state,
                "problem": run.problem,
                SCORES: run.result.get(SCORES, {}),
            }
            for run in self.runs
        ]
        content = {"varied": list(self.varied), "space": self.space, "runs": rows}
        content["references"] = self.references
        files.write(self.folder / RUNS, json.dumps(content, indent=1).encode())
        finished = self.finished()
        files.write(self.folder / SWEEP, json.dumps(finished, indent=1).encode())
        write_csv(ranked(finished), self.folder / CSV)


FIGURES = {"*": {"*": float}}
"""Figures by task and name."""
SHAPE = {
    "varied": [str],
    "space": object,
    "runs": [
        {
            "folder": str,
            "settings": {"*": str},
            "params": dict,
            "state": ("waiting", "running", "finished", "pruned", "failed"),
            "problem": str,
            f"{SCORES}?": FIGURES,
        }
    ],
    "references?": {"*": FIGURES},
}
"""The schema of runs.json."""


def read_runs(folder: Path) -> dict[str, Any] | None:
    """Read runs.json, or return None. Raises UserError if it is damaged."""
    remedy = "remove it: the students in the folder are not affected"
    # `exists` is called here, too: `read_record` would report an unreadable folder as a damaged
    # file, with the wrong remedy.
    return read_record(folder / RUNS, SHAPE, remedy) if (folder / RUNS).exists() else None


def validations(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Read step and figures of each validation of a training, finished or not.

    Raises UserError for an invalid line.
    """
    path, rows = folder / METRICS, []
    lines = read_small(path, MOST_METRICS).splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            figures = json.loads(line)
        except (ValueError, RecursionError):  # torn by a kill
            continue
        names = figures if isinstance(figures, dict) else ()
        valid = {name: float for name in names if name.startswith("valid_")}
        if isinstance(figures, dict) and not valid:
            continue
        if problem := schema_violation(figures, {"step": int, **valid}):
            raise UserError(f"{path}, line {number}: {problem}; remove that line")
        rows.append((figures.pop("step"), figures))
    return rows
