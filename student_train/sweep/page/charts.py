"""Draw the charts of a sweep's page (Altair), and make the table under each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from teachonce.student_train.output.ranking import LOSS, Measure, comparable
from teachonce.support.packages import library
from teachonce.support.parsing import LARGEST

if TYPE_CHECKING:
    from teachonce.student_train.sweep.page.report import StudentFiles

FEWEST = 4
"""Smallest number of students for which the importance of settings is estimated."""
COLORS = 6
"""Number of colours that the page has for categories."""
FRONT = ("on the front", "behind it")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])
HEIGHT = 300
Chart = dict[str, Any]
"""Title, Vega-Lite `spec`, and `headings` and `rows` of the same figures."""


@cache
def bundle() -> str:
    """Return the JavaScript library (Vega-Lite) that draws the charts."""
    script = library("vl_convert", "report", "--page").javascript_bundle()
    # HTML ends a script at these letters, also within a string.
    return str(script).replace("</script", "<\\/script")


class Point(NamedTuple):
    """Holds a student and its cost; `low` and `high` are the quartiles if the cost was measured
    repeatedly, else the cost."""

    student: StudentFiles
    cost: float
    low: float
    high: float


def front(points: Sequence[Point], measure: Measure) -> list[Point]:
    """Return the Pareto front, the cheapest first.

    A student is on it if no better student is cheaper, or as cheap within the quartiles of both
    costs: noise puts no student on the front.
    """
    judged = [p for p in points if measure.of(p.student.figures) < math.inf]
    judged.sort(key=lambda p: (measure.of(p.student.figures), p.cost))
    on_front = [
        point
        for rank, point in enumerate(judged)
        if not any(better.low <= point.high for better in judged[:rank])
    ]
    return sorted(on_front, key=lambda p: p.cost)


def trade_off(
    points: Sequence[Point], measure: Measure, cost: str, lines: Mapping[str, float]
) -> Chart | None:
    """Draw quality against a cost, with the Pareto front; return None without points."""
    if not points:
        return None
    alt = library("altair", "report", "--page")
    on_front = front(points, measure)
    best = {point.student.number for point in on_front}
    rows = [
        {
            "student": student.number,
            "cost": value,
            "low": low,
            "high": high,
            "quality": student.figures[measure.name],
            "front": FRONT[0] if student.number in best else FRONT[1],
            "settings": ", ".join(f"{n} {v}" for n, v in student.settings.items()),
            "url": f"#card-{student.number}",
        }
        for student, value, low, high in points
    ]
    rows.sort(key=lambda row: row["front"] == FRONT[0])  # drawn last, so that they cover the others
    x = alt.X("cost:Q", title=cost, scale=alt.Scale(zero=False, nice=True))
    y = alt.Y("quality:Q", title=_axis(measure), scale=alt.Scale(zero=False, nice=True))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    marks = base.mark_point(size=110, filled=True, opacity=1).encode(
        color=alt.Color("front:N", title=None, scale=alt.Scale(domain=list(FRONT))),
        shape=alt.Shape("front:N", title=None, scale=alt.Scale(domain=list(FRONT))),
        href="url:N",
        tooltip=["student:O", "settings:N", "quality:Q", "cost:Q"],
    )
    names = base.mark_text(dy=-13, fontSize=12).encode(text="student:O")
    path = [row for row in rows if row["front"] == FRONT[0]]
    step = alt.Chart(alt.Data(values=path)).mark_line(strokeWidth=2, opacity=0.6)
    spread = base.mark_rule(strokeWidth=1).encode(x=alt.X("low:Q", title=cost), x2="high:Q")
    spreads = [spread] if any(point.low < point.high for point in points) else []
    chart = alt.layer(*_rules(alt, lines), step.encode(x=x, y=y), *spreads, marks, names)
    table = [(r["student"], r["settings"], r["quality"], r["cost"], r["front"]) for r in rows]
    return {
        "title": f"{measure.name} against {cost}",
        "about": f"{_axis(measure)}. The line joins the Pareto front: no student is both better"
        " and cheaper, or as cheap up to the quartiles of their costs. A point leads to the"
        " student's card.",
        "spec": _spec(chart),
        "headings": ("student", "settings", measure.name, cost, "Pareto front"),
        "rows": [*table, *((name, "", value, "", "") for name, value in lines.items())],
    }


def _axis(measure: Measure) -> str:
    return f"{measure.name} ({'more' if measure.largest else 'less'} is better)"


def _rules(alt: Any, lines: Mapping[str, float]) -> list[Any]:
    if not lines:
        return []
    data = alt.Data(values=[{"name": name, "quality": value} for name, value in lines.items()])
    rule = alt.Chart(data).mark_rule(strokeDash=[6, 4], strokeWidth=1.5).encode(y="quality:Q")
    name = alt.Chart(data).mark_text(align="right", dx=-4, dy=-6, fontSize=12)
    return [rule, name.encode(y="quality:Q", x=alt.value("width"), text="name:N")]


def importances(
    students: Sequence[StudentFiles], measure: Measure, varied: Sequence[str]
) -> dict[str, float]:
    """Estimate how much each varied setting matters for a measure, as shares that add up to 1.

    A share is the rise of a random forest's error if that setting is permuted (Breiman 2001). Empty
    if there are too few students, or if all have the same value.
    """
    names = [n for n in varied if len({s.settings.get(n) for s in students}) > 1]
    quality = np.array([s.figures[measure.name] for s in students])
    if len(students) < FEWEST or not names or not np.ptp(quality):
        return {}
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    table = np.array([_codes([s.settings.get(n, "") for s in students]) for n in names]).T
    # Seeded, so that the same files give the same page.
    forest = RandomForestRegressor(100, random_state=0, bootstrap=len(students) > 9)
    forest.fit(table, quality)
    result = permutation_importance(forest, table, quality, random_state=0)
    # A setting without effect may lower the error by chance.
    rises = np.maximum(result.importances_mean, 0)
    return {n: float(r / (rises.sum() or 1)) for n, r in zip(names, rises, strict=True)}


def _codes(words: Sequence[str]) -> list[float]:
    """Return settings as numbers; if one of them is not a number, number the distinct words."""
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if numbers and all(abs(number) < LARGEST for number in numbers):  # neither NaN nor infinite
        return numbers
    distinct = sorted(set(words))
    return [float(distinct.index(word)) for word in words]


def importance_bars(shares: Mapping[str, float], measure: Measure) -> Chart | None:
    """Draw the importance of each setting; return None if `shares` is empty."""
    if not shares:
        return None
    alt = library("altair", "report", "--page")
    rows = [{"setting": name, "share": share} for name, share in shares.items()]
    chart = alt.Chart(alt.Data(values=rows)).mark_bar()
    chart = chart.encode(
        x=alt.X("share:Q", title="share of importance", axis=alt.Axis(format="%")),
        y=alt.Y("setting:N", title=None, sort="-x"),
        tooltip=["setting:N", alt.Tooltip("share:Q", format=".0%")],
    )
    spec = _spec(chart, 40 * len(rows))
    return {
        "title": f"Settings that mattered most for {measure.name}",
        "about": "How much worse a random forest predicts a student's figure if that setting is"
        " permuted. With few students this is only a hint.",
        "spec": spec,
        "headings": ("setting", "share"),
        "rows": sorted(((n, s) for n, s in shares.items()), key=lambda row: -row[1]),
    }


def _figure_of_curves(
    students: Sequence[StudentFiles], measure: Measure, varied: Sequence[str]
) -> str | None:
    """Return the validation figure to draw for a measure; None if no student has it.

    If the measure is a score of a task, this is a figure that all students can share: the loss if
    it is comparable, else the first comparable figure that a student has.
    """
    if measure.name.startswith("valid_"):
        candidates: Sequence[Measure] = [measure]
    else:
        candidates = sorted(comparable(varied), key=lambda m: m is not LOSS)
    validated = {name for student in students for _, figures in student.curve for name in figures}
    return next((m.name for m in candidates if m.name in validated), None)


def curves(
    students: Sequence[StudentFiles],
    measure: Measure,
    varied: Sequence[str],
    lines: Mapping[str, float],
) -> Chart | None:
    """Draw the validations of each student over the steps: `measure`, or the most comparable
    validation figure. Return None if no student has one."""
    name = _figure_of_curves(students, measure, varied)
    if name is None:
        return None
    rows = [
        {"student": str(s.number), "step": step, "figure": figures[name]}
        for s in students
        for step, figures in s.curve
        if name in figures
    ]
    alt = library("altair", "report", "--page")
    drawn_of = list(dict.fromkeys(row["student"] for row in rows))
    legend = alt.Legend(columns=2, symbolType="stroke", symbolSize=400)
    of_each = {"sort": None, "title": "student", "legend": legend}
    dashes = [DASHES[i // COLORS % len(DASHES)] for i in range(len(drawn_of))]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="step"),
        y=alt.Y("figure:Q", title=name, scale=alt.Scale(zero=False)),
        color=alt.Color("student:N", scale=alt.Scale(domain=drawn_of), **of_each),
        tooltip=["student:N", "step:Q", "figure:Q"],
    )
    references = lines if name == measure.name else {}
    rules = [rule.encode(y=alt.Y("quality:Q", title=name)) for rule in _rules(alt, references)]
    dashed = base.mark_line().encode(  # students of the same colour have different dashes
        strokeDash=alt.StrokeDash(
            "student:N", scale=alt.Scale(domain=drawn_of, range=dashes), **of_each
        )
    )
    drawn = alt.layer(*rules, dashed, base.mark_point(size=25, filled=True))
    return {
        "title": f"Curves of {name}",
        "about": "Each validation of each student, including students in training.",
        "spec": _spec(drawn),
        "headings": ("student", "step", name),
        "rows": [tuple(row.values()) for row in rows],
    }


def _spec(chart: Any, height: int = HEIGHT) -> dict[str, Any]:
    sized = chart.properties(width="container", height=height)
    # Without Altair's check against the schema of Vega-Lite: a third of the time of a page.
    return dict(sized.to_dict(validate=False))
