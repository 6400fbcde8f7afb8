"""Writes `index.html` of a sweep, for choosing a student, from the sweep's files. It can be written
at any time."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from teachonce.checkpoints.names import ResolvedModel
from teachonce.checkpoints.sentence_settings import module_weights
from teachonce.student_train.cli import format_number
from teachonce.student_train.output.ranking import (
    DEVIATION,
    QUARTILES,
    SCORES,
    Measure,
    answers_alike,
    flat_row,
    measures_of,
)
from teachonce.student_train.output.report import SETTINGS, read_report, trained_losses
from teachonce.student_train.sweep.page.charts import (
    FEWEST,
    Point,
    bundle,
    curves,
    importance_bars,
    importances,
    trade_off,
)
from teachonce.student_train.sweep.runs import METRICS, RUNS, read_runs, validations
from teachonce.support.console import counted, readable
from teachonce.support.errors import UserError
from teachonce.support.html import write_page
from teachonce.support.parsing import read_small, schema_violation
from teachonce.support.redaction import publishable, without_credentials

TEMPLATES = Path(__file__).parent
PAGE = "index.html"
WEIGHTS, CARD = "model.safetensors", "README.md"
TEXT_ALONE = {"mlm": "MLM only", "next": "next alone"}
"""The losses that need no teacher, and how charts name the best student trained with each alone."""
MOST_CARD = 1 << 20  # bytes of a card; a larger file is refused
WHAT = "--page"
SMALLER = 0.75
"""A student below this share of the best student's size is recommended as a smaller one."""
OF_TEACHER = ("valid_agreement", "valid_spearman")
"""Figures that compare a student with the teacher. The teacher itself has the value 1."""


@dataclass
class StudentFiles:
    """Holds the content of a student's files."""

    number: int
    folder: str
    settings: Mapping[str, str]
    state: str
    problem: str
    figures: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)  # means over several seeds
    losses: Set[str] = frozenset()
    bytes: int | None = None
    curve: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    card: str = ""

    @property
    def latency(self) -> Point | None:
        """Return the milliseconds per sentence on the CPU: the median, with its quartiles; None if
        they were not measured."""
        names = [name for name in self.figures if name.endswith("cpu sentence_ms")]
        if not names:
            return None
        median = self.figures[names[0]]
        low, high = (self.figures.get(f"{names[0]} {which}", median) for which in QUARTILES)
        return Point(self, median, low, high)

    @property
    def trained(self) -> bool:
        """Return whether the student's answers differ: an untrained student gives the same answer
        to every text."""
        return not answers_alike(self.figures)

    def shown(self, measure: Measure) -> str:
        """Return the figure of a measure, with its deviation over seeds if there is one."""
        deviation = self.figures.get(f"{measure.name} {DEVIATION}")
        spread = "" if deviation is None else f" ± {format_number(deviation)}"
        figure = self.figures.get(measure.name)
        return "" if figure is None else f"{format_number(figure)}{spread}"


def write_report(folder: Path) -> Path:
    """Write the page of a sweep, whatever the state of its runs. Returns its path.

    Raises UserError if the folder has no sweep, or Altair is missing.
    """
    if not _is_inside(folder / RUNS, folder) or (runs := read_runs(folder)) is None:
        raise UserError(f"{folder}: no {RUNS} there; give the folder of a student-sweep")
    # By the names in the file: `publishable` cuts a path to its last part.
    paths = [folder / run["folder"] for run in runs["runs"]]
    runs = publishable(runs)  # no local paths or credentials: pages are sent to others
    students = [
        _read(folder, path, number, run)
        for number, (path, run) in enumerate(zip(paths, runs["runs"], strict=True), 1)
    ]
    measures = measures_of([s.figures for s in students], runs["varied"])
    if "seed" in runs["varied"]:  # a search may repeat settings with one seed
        _add_means(students, measures)
    references = runs.get("references", {}).items()
    models = {name: figures_of({SCORES: scores}) for name, scores in references}
    views = [_view(students, measure, runs["varied"], models, folder) for measure in measures]
    page = folder / PAGE
    write_page(
        page,
        TEMPLATES,
        "sweep.html.jinja",
        WHAT,
        title=f"Sweep {folder.resolve().name}",
        lead=_lead(students, measures, [name for name, scores in models.items() if not scores]),
        students=students,
        ranked=_ranked(students, measures[0]) if measures else students,
        columns=runs["varied"],
        measures=measures,
        cell=_cell,
        readable=readable,
        fewest=FEWEST,
        views=views,
        specs=[[chart["spec"] for chart in view["charts"]] for view in views],
        orders=[view["order"] for view in views],
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
        student.losses = trained_losses(report.get("settings", {}))
        student.figures = figures_of({**report.get("result", {}), SCORES: run.get(SCORES, {})})
        student.curve = [(step, figures_of(figures)) for step, figures in validations(path)]
        if (path / WEIGHTS).exists():
            student.bytes = sum(
                file.stat().st_size
                for file in (path / WEIGHTS, *module_weights(ResolvedModel(str(path), path.name)))
                if _is_inside(file, folder)
            )
        if student.bytes is not None and (path / CARD).exists():
            student.card = without_credentials(read_small(path / CARD, MOST_CARD))
    except (OSError, UserError) as error:  # the page still shows the other students
        student.problem = publishable(str(error))
    return student


def _add_means(students: Sequence[StudentFiles], measures: Sequence[Measure]) -> None:
    """Add the mean and sample deviation of each measure over the students that differ only by
    their seed."""
    groups = defaultdict[tuple[Any, ...], list[StudentFiles]](list)
    for student in students:
        groups[tuple((k, v) for k, v in student.settings.items() if k != "seed")].append(student)
    for group in groups.values():
        for measure in measures:
            values = [s.figures[measure.name] for s in group if measure.name in s.figures]
            for student in group if len(values) > 1 else ():
                if measure.name in student.figures:
                    student.means[measure.name] = fmean(values)
                    # A score that has a deviation over the seeds of its fine-tuning retains it.
                    student.figures.setdefault(f"{measure.name} {DEVIATION}", stdev(values))


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite figures of a row, including its scores."""
    return {
        name: v
        for name, v in flat_row(row).items()
        if not schema_violation(v, float) and math.isfinite(v)
    }


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path leads to a file within `folder`."""
    # An untrusted sweep may have paths and links that lead elsewhere.
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def _view(
    students: Sequence[StudentFiles],
    measure: Measure,
    varied: Sequence[str],
    models: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """Make what the page shows for a measure: the student to ship, the `order` of the students'
    numbers, their shares of the teacher's figure if it is known, and charts with their tables."""
    lines = _lines(students, measure)
    lines |= {name: f[measure.name] for name, f in models.items() if measure.name in f}
    done = [s for s in students if measure.of(s.figures) < math.inf]
    sizes = [Point(s, *(s.bytes / 1e6,) * 3) for s in done if s.bytes]
    times = [s.latency for s in done if s.latency]
    charts = [
        trade_off(sizes, measure, "megabytes of weights", lines),
        trade_off(times, measure, "milliseconds a sentence, CPU", lines),
        importance_bars(importances(done, measure, varied), measure),
        curves(students, measure, varied, lines),
    ]
    shares = {s.number: of_teacher(s, measure, lines) for s in students}
    return {
        "measure": measure,
        "choice": _choice(students, measure, lines, folder),
        "order": [s.number for s in _ranked(students, measure)],
        "shares": shares if any(shares.values()) else {},
        "charts": [chart for chart in charts if chart],
    }


def _lines(students: Sequence[StudentFiles], measure: Measure) -> dict[str, float]:
    """Return the reference values of a measure: the teacher's value and, for each loss that needs
    no teacher, the value of the best student trained with it alone."""
    lines = {"teacher": 1.0} if measure.name in OF_TEACHER else {}
    for loss, line in TEXT_ALONE.items():
        alone = [s for s in _with_figure(students, measure) if s.losses == {loss}]
        if alone and len(alone) < len(students):
            lines[line] = alone[0].figures[measure.name]
    return lines


def _lead(
    students: Sequence[StudentFiles], measures: Sequence[Measure], unscored: Sequence[str]
) -> list[str]:
    """Return lines: the number of students by state, a note if no student can be compared, and the
    other models that have no scores."""
    states = [s.state for s in students]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    lines = [f"{counted(len(students), 'student')}: {', '.join(counts)}."]
    if not measures:
        lines.append("No student has a comparable figure yet.")
    if unscored:
        lines.append(f"No scores yet: {', '.join(unscored)}. They follow the last student.")
    return lines


def _choice(
    students: Sequence[StudentFiles], measure: Measure, lines: Mapping[str, float], folder: Path
) -> dict[str, str]:
    """Return the sentence that names the student to ship by a measure (the best student of the best
    setting), and the command that exports it; {} if no trained student has a figure.

    lines: reference values, of which `teacher` is compared with the student. folder: the sweep's,
        as it was typed; an absolute path is not shown.
    """
    done = [s for s in _with_figure(students, measure) if s.trained and s.bytes]
    if not done:
        return {}
    # By means over seeds: one student may be ahead by its seed alone.
    done.sort(key=lambda s: measure.of({**s.figures, **s.means}))
    best = done[0]
    mean = best.means.get(measure.name)
    reason = f"its {measure.name} of {best.shown(measure)} is the best of"
    if mean is not None:
        reason = f"its setting has the best mean {measure.name}, {format_number(mean)}, of"
    text = (
        f"Ship number {best.number}, because {reason} {counted(len(done), 'student')}"
        f" ({measure.meaning})"
    )
    if mean is not None:
        text += f"; its own, {best.shown(measure)}, is the best of these seeds"
    if share := of_teacher(best, measure, lines):
        text += f", {share} of the teacher's"
    text += f", in {readable(best.bytes or 0)}"
    small = [s for s in done if (s.bytes or 0) < SMALLER * (best.bytes or 0)]
    if small:
        text += (
            f"; the best that is at least a quarter smaller is number {small[0].number}, with"
            f" {small[0].shown(measure)} in {readable(small[0].bytes or 0)}"
        )
    shown = Path(folder.name) if folder.is_absolute() else folder
    path = shlex.quote(str(shown / best.folder))
    if folder.is_absolute():
        text += f". To export it, run this command in the folder that contains {shown}"
    if f"{measure.name} {DEVIATION}" not in best.figures:
        text += (
            ". These figures have no standard deviations: with several seeds the order may differ"
        )
    out = shlex.quote(f"{Path(best.folder).name}-onnx")
    return {"text": f"{text}.", "command": f"student-export {path} --to onnx --out {out}"}


def of_teacher(student: StudentFiles, measure: Measure, lines: Mapping[str, float]) -> str:
    """Return a student's share of the teacher's figure in percent; "" if it is not known, or if the
    smallest figure is the best."""
    figure, teacher = student.figures.get(measure.name), lines.get("teacher")
    if not measure.largest or figure is None or not teacher or teacher <= 0:
        return ""
    return f"{100 * figure / teacher:.1f} %"


def _ranked(students: Sequence[StudentFiles], measure: Measure) -> list[StudentFiles]:
    """Sort students by a measure, the best first; students without it come last."""
    return sorted(students, key=lambda s: measure.of(s.figures))


def _with_figure(students: Sequence[StudentFiles], measure: Measure) -> list[StudentFiles]:
    """Sort the students that have a measure, the best first."""
    return [s for s in _ranked(students, measure) if measure.of(s.figures) < math.inf]


def _cell(value: Any) -> str:
    return format_number(value) if isinstance(value, int | float) else str(value or "")
