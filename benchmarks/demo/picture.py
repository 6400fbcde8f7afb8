"""The comparison as a picture: the one module that needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.demo.measure import Comparison, Model
from benchmarks.demo.table import legend

COLOURS = {
    "teacher": "#4a4e57",
    "before training": "#b4b9c2",
    "distilled": "#0b7a75",
    "MLM only": "#d1603d",
}
SMOOTHED = 25  # steps over which the drawn training loss is averaged
INK, FAINT = "#22252b", "#e3e5e9"


def draw(comparison: Comparison, path: Path) -> None:
    """Loss curves, agreement with the teacher, size and speed, as a PNG."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(13, 8.8), dpi=110, layout=layout)
    figure.suptitle(
        "One teacher pass, two students: what the stored knowledge adds", fontsize=17, color=INK
    )
    told = textwrap.fill(legend(comparison.sentences), 165)
    figure.supxlabel(told, x=0.02, ha="left", fontsize=9, color="#555b66")
    teacher, start, distilled, plain = comparison.models
    rows = figure.add_gridspec(2, 1, height_ratios=[1.1, 1], hspace=0.08)
    top = rows[0].subgridspec(1, 2, width_ratios=[1.35, 1], wspace=0.06)
    _losses(figure.add_subplot(top[0]), comparison)
    _agreement(figure.add_subplot(top[1]), [start, plain, distilled], comparison.sentences)
    bottom = rows[1].subgridspec(1, 3, wspace=0.06)
    _pairs(figure.add_subplot(bottom[0]), teacher, distilled)
    _pairs(figure.add_subplot(bottom[1]), teacher, plain)
    cost = bottom[2].subgridspec(2, 1, hspace=0.12)
    sizes = {"Size: MB in float32": "megabytes", "Speed: sentences/s, CPU": "sentences_per_second"}
    for i, (title, measure) in enumerate(sizes.items()):
        values = [getattr(model, measure) for model in (teacher, distilled)]
        _cost(figure.add_subplot(cost[i]), title, [teacher, distilled], values)
    figure.savefig(path)


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa0aa")
    axes.tick_params(colors="#555b66", labelsize=9)


def _losses(axes: Any, comparison: Comparison) -> None:
    for name, rows in comparison.curves.items():
        colour = COLOURS[name]
        trained = np.array([(row["step"], row["mlm"]) for row in rows if "mlm" in row])
        held_out = np.array([(row["step"], row["valid_mlm"]) for row in rows if "valid_mlm" in row])
        window = max(1, min(SMOOTHED, len(trained) // 4))
        smooth = np.convolve(trained[:, 1], np.ones(window) / window, "valid")
        axes.plot(trained[window - 1 :, 0], smooth, color=colour, alpha=0.35, lw=1.5)
        told = f"{name} {held_out[-1, 1]:.2f}"
        axes.plot(*held_out.T, "o-", color=colour, lw=2.2, ms=5, label=told)
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=11, labelcolor="linecolor", loc="upper right")
    axes.grid(axis="y", color=FAINT)
    axes.set_xlabel("training step", fontsize=10)
    _style(axes, "Masked-LM loss, nats a token: held-out (points), training (pale)")


def _agreement(axes: Any, models: list[Model], sentences: int) -> None:
    _bars(axes, models, [model.name for model in models], [m.agreement for m in models], "{:.2f}")
    axes.set_xlim(min(0, *(model.agreement for model in models)), 1)
    axes.set_xlabel("Spearman with the teacher (1 = the same order)", fontsize=10)
    _style(axes, f"Similarities of {sentences * (sentences - 1) // 2:,} pairs of unseen paragraphs")


def _pairs(axes: Any, teacher: Model, student: Model) -> None:
    axes.hexbin(
        teacher.similarities,
        student.similarities,
        gridsize=45,
        bins="log",
        mincnt=1,
        cmap=_shades(COLOURS[student.name]),
        linewidths=0.1,
    )
    axes.set_xlabel("teacher's cosine", fontsize=10)
    axes.set_ylabel("student's cosine", fontsize=10)
    _style(axes, f"A point a pair: {student.name}, Spearman {student.agreement:.2f}")


def _shades(colour: str) -> Any:
    return LinearSegmentedColormap.from_list(colour, ["#f1f2f4", colour])


def _cost(axes: Any, title: str, models: list[Model], values: list[float]) -> None:
    _bars(axes, models, ["teacher", "student"], values, "{:,.0f}")
    axes.set_xlim(0, 1.2 * max(values))
    axes.set_xticks([])
    _style(axes, f"{title} (ratio {max(values) / min(values):.0f})")
    axes.spines["bottom"].set_visible(False)


def _bars(axes: Any, models: list[Model], names: list[str], values: list[float], told: str) -> None:
    bars = axes.barh(names, values, color=[COLOURS[model.name] for model in models], height=0.62)
    axes.bar_label(bars, [f" {told.format(value)}" for value in values], fontsize=11, color=INK)
    axes.invert_yaxis()
