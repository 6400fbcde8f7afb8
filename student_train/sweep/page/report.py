"""`index.html` of a sweep, for choosing a student. It is made from the sweep's files, at any
time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from teachonce.student_train.cli import format_number
from teachonce.student_train.output.ranking import LOSS, MEASURES, Measure, compares_losses
from teachonce.student_train.output.report import SETTINGS, read_report
from teachonce.student_train.sweep.page.charts import (
    bundle,
    curves,
    importance_bars,
    importances,
    trade_off,
)
from teachonce.student_train.sweep.runs import METRICS, RUNS, read_runs, validations
from teachonce.student_train.sweep.table import SCORES, flat
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError
from teachonce.support.json_file import misfit, read_small
from teachonce.support.pages import write_page
from teachonce.support.redaction import publishable, without_credentials

TEMPLATES = Path(__file__).parent
PAGE = "index.html"
WEIGHTS, CARD = "model.safetensors", "README.md"
TEXT_ALONE = {"mlm": "MLM only", "next": "next alone"}
"""The losses that need no teacher, and the name of a line for the best student of each."""
MOST_CARD = 1 << 20
WHAT = "--page"
SMALLEST_BEST = ("ms", "bytes", "loss", "nats", "perplexity")
KNOWN_OF_TEACHER = {"valid_agreement": 1.0, "valid_spearman": 1.0}
"""The teacher's own value of figures that compare a student with it."""


@dataclass
class StudentFiles:
    """The content of a student's files."""

    number: int
    folder: str
    settings: Mapping[str, str]
    state: str
    problem: str
    figures: dict[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    bytes: int | None = None
    curve: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    card: str = ""

    @property
    def latency(self) -> float | None:
        found = [v for name, v in self.figures.items() if name.endswith("cpu sentence_ms")]
        return found[0] if found else None


def write_report(folder: Path) -> Path:
    """Write the page of a sweep, whatever the state of its runs. Returns its path.

    Raises UserError if the folder has no sweep, or Altair is missing.
    """
    if not _is_inside(folder / RUNS, folder) or (runs := read_runs(folder)) is None:
        raise UserError(f"{folder}: no {RUNS} there; give the folder of a student-sweep")
    paths = [folder / run["folder"] for run in runs["runs"]]
    runs = publishable(runs)  # no local paths or credentials: pages are sent to others
    students = [
        _read(folder, path, number, run)
        for number, (path, run) in enumerate(zip(paths, runs["runs"], strict=True), 1)
    ]
    measures = _measures(students, runs["varied"])
    references = runs.get("references", {}).items()
    others = {name: figures_of({SCORES: each}) for name, each in references}
    views = [_view(students, measure, runs["varied"], others) for measure in measures]
    page = folder / PAGE
    write_page(
        page,
        TEMPLATES,
        "sweep.html.jinja",
        WHAT,
        title=f"Sweep {folder.resolve().name}",
        lead=_lead(students, measures),
        students=students,
        ranked=_ranked(students, measures),
        columns=runs["varied"],
        measures=measures,
        cell=_cell,
        readable=readable,
        views=views,
        specs=[[chart["spec"] for chart in view["charts"]] for view in views],
        bundle=bundle() if views else "",
    )
    return page


def _read(folder: Path, path: Path, number: int, run: Mapping[str, Any]) -> StudentFiles:
    student = StudentFiles(number, run["folder"], run["settings"], run["state"], run["problem"])
    try:
        for file in (SETTINGS, METRICS, WEIGHTS, CARD):
            if (path / file).exists() and not _is_inside(path / file, folder):
                raise UserError(
                    f"{path / file} is not a file of the sweep's folder, and is not read"
                )
        report = read_report(path) or {}
        student.losses = report.get("settings", {}).get("loss", {})
        student.figures = figures_of({**report.get("result", {}), SCORES: run.get(SCORES, {})})
        student.curve = [(step, figures_of(each)) for step, each in validations(path)]
        if (path / WEIGHTS).exists():
            student.bytes = (path / WEIGHTS).stat().st_size
        if student.bytes is not None and (path / CARD).exists():
            student.card = without_credentials(read_small(path / CARD, MOST_CARD))
    except (OSError, UserError) as error:  # the page still shows the other students
        student.problem = publishable(str(error))
    return student


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite figures of a row, including its scores."""
    return {name: v for name, v in flat(row).items() if not misfit(v, float) and math.isfinite(v)}


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a file within `folder`."""
    # An untrusted sweep may have paths and links that lead elsewhere.
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _measures(students: Sequence[StudentFiles], varied: Sequence[str]) -> list[Measure]:
    """List the quality measures of the students, the most comparable first."""
    met = list(dict.fromkeys(name for s in students for name in s.figures))
    found = [m for m in (*MEASURES, *([LOSS] if compares_losses(varied) else [])) if m.name in met]
    for name in met:
        heading = name.rpartition(" ")[2]
        other = any(word in heading for word in (*SMALLEST_BEST, "deviation"))
        if " " in name and not other:
            found.append(Measure(name, "a score of a task, in percent", largest=True))
    return found


def _view(
    students: Sequence[StudentFiles],
    measure: Measure,
    varied: Sequence[str],
    others: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Make the charts of a measure, each with its table."""
    lines = _lines(students, measure)
    lines |= {name: each[measure.name] for name, each in others.items() if measure.name in each}
    done = [s for s in students if measure.of(s.figures) < math.inf]
    sizes = [(s, s.bytes / 1e6) for s in done if s.bytes]
    times = [(s, s.latency) for s in done if s.latency]
    charts = [
        trade_off(sizes, measure, "megabytes of weights", lines),
        trade_off(times, measure, "milliseconds a sentence, CPU", lines),
        importance_bars(importances(done, measure, varied), measure),
        curves(students, measure, lines),
    ]
    return {"measure": measure, "charts": [chart for chart in charts if chart]}


def _lines(students: Sequence[StudentFiles], measure: Measure) -> dict[str, float]:
    """Return the reference values of a measure: the teacher's, and that of the best student
    of each loss that needs no teacher."""
    found = {}
    if measure.name in KNOWN_OF_TEACHER:
        found["teacher"] = KNOWN_OF_TEACHER[measure.name]
    for loss, line in TEXT_ALONE.items():
        alone = [s.figures for s in students if set(s.losses) == {loss}]
        alone = [figures for figures in alone if measure.of(figures) < math.inf]
        if alone and len(alone) < len(students):
            found[line] = min(alone, key=measure.of)[measure.name]
    return found


def _lead(students: Sequence[StudentFiles], measures: Sequence[Measure]) -> list[str]:
    """Return a summary: the counts, the best student, and the best smaller one."""
    states = [s.state for s in students]
    counts = [f"{states.count(each)} {each}" for each in dict.fromkeys(states)]
    lines = [f"{counted(len(students), 'student')}: {', '.join(counts)}."]
    if not measures:
        return [*lines, "No student has a comparable figure yet."]
    first = measures[0]
    done = [s for s in _ranked(students, measures) if s.figures]
    best = done[0]
    lines.append(
        f"The best is number {best.number}: {first.name} {format_number(best.figures[first.name])}"
        f" ({first.why}), {readable(best.bytes or 0)}."
    )
    small = [s for s in done if s.bytes and best.bytes and s.bytes < 0.75 * best.bytes]
    if small and first.of(small[0].figures) < math.inf:
        lines.append(
            f"The best that is at least a quarter smaller is number {small[0].number}:"
            f" {format_number(small[0].figures[first.name])}, {readable(small[0].bytes or 0)}."
        )
    return lines


def _ranked(students: Sequence[StudentFiles], measures: Sequence[Measure]) -> list[StudentFiles]:
    """Sort students by the first measure, the best first; students without it come last."""
    return sorted(students, key=lambda s: measures[0].of(s.figures)) if measures else [*students]


def _cell(value: Any) -> str:
    return format_number(value) if isinstance(value, int | float) else str(value or "")
