"""What the demo shows: a table in the terminal and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.demo import Comparison, Model

COLOURS = {
    "teacher": "#4a4e57",
    "before training": "#b4b9c2",
    "distilled": "#0b7a75",
    "MLM only": "#d1603d",
}
SMOOTHED = 25  # steps over which the drawn training loss is averaged
INK, FAINT = "#22252b", "#e3e5e9"


def show(comparison: Comparison) -> None:
    """The comparison as a table in the terminal."""
    from rich.console import Console
    from rich.table import Table

    teacher = comparison.models[0]
    table = Table(title="held-out text, CPU")
    table.add_column("model")
    for head in ("parameters", "MB", "sentences/s", "MLM loss", "similarities as the teacher's"):
        table.add_column(head, justify="right")
    for model in comparison.models:
        faster = model.sentences_per_second / teacher.sentences_per_second
        smaller = teacher.parameters / model.parameters
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:.1f}M" + (f" (1/{smaller:.0f})" if smaller > 1 else ""),
            f"{model.megabytes:.1f}",
            f"{model.sentences_per_second:,.0f}" + (f" (x{faster:.0f})" if smaller > 1 else ""),
            "" if model.mlm is None else f"{model.mlm:.2f}",
            f"{model.agreement:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(legend(comparison.sentences), highlight=False)


def legend(sentences: int) -> str:
    """What was compared, in words."""
    pairs = sentences * (sentences - 1) // 2
    return (
        f"Similarities: Spearman between the teacher's and the model's cosines of all {pairs:,}"
        f" pairs of {sentences} paragraphs that were not dumped. A paragraph's vector is the mean"
        " over layers and tokens, less the mean of all paragraphs; the same for every model."
        " MLM loss: nats a masked token, on the held-out part of the store. Before training: word"
        " embeddings from the teacher's by SVD, layers at random; both students start there."
    )


def draw(comparison: Comparison, path: Path) -> None:
    """Loss curves, agreement with the teacher, size and speed, as a PNG."""
    figure = Figure(figsize=(13, 8.2), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)
    figure.suptitle(
        "One teacher pass, two students: what the stored knowledge adds", fontsize=17, color=INK
    )
    grid = figure.add_gridspec(2, 12, height_ratios=[1.1, 1])
    _losses(figure.add_subplot(grid[0, :7]), comparison)
    _agreement(figure.add_subplot(grid[0, 7:]), comparison)
    by_name = {model.name: model for model in comparison.models}
    for place, name in ((grid[1, :4], "distilled"), (grid[1, 4:8], "MLM only")):
        _pairs(figure.add_subplot(place), by_name["teacher"], by_name[name])
    cost = grid[1, 8:].subgridspec(2, 1)
    students = [by_name["teacher"], by_name["distilled"]]
    _bars(
        figure.add_subplot(cost[0]),
        "Size: MB in float32",
        students,
        [m.megabytes for m in students],
    )
    _bars(
        figure.add_subplot(cost[1]),
        "Speed: sentences/s on this CPU",
        students,
        [m.sentences_per_second for m in students],
    )
    FigureCanvasAgg(figure).print_png(path)


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
        axes.plot(*held_out.T, "o-", color=colour, lw=2.2, ms=5)
        axes.annotate(
            f" {name} {held_out[-1, 1]:.2f}",
            held_out[-1],
            color=colour,
            fontsize=11,
            weight="bold",
            va="center",
        )
    axes.margins(x=0.02)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.2)
    axes.grid(axis="y", color=FAINT)
    axes.set_xlabel("training step", fontsize=10)
    _style(axes, "Masked-LM loss, nats a token: held-out (points), training (pale)")


def _agreement(axes: Any, comparison: Comparison) -> None:
    models = comparison.models[1:][::-1]
    _draw_bars(axes, models, [model.agreement for model in models], "{:.2f}")
    axes.set_xlim(min(0, *(model.agreement for model in models)), 1)
    axes.set_xlabel("Spearman with the teacher (1 = the same order)", fontsize=10)
    count = comparison.sentences
    _style(axes, f"Similarities of {count * (count - 1) // 2:,} pairs of unseen paragraphs")


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
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(colour, ["#f1f2f4", colour])


def _bars(axes: Any, title: str, models: list[Model], values: list[float]) -> None:
    _draw_bars(axes, models[::-1], values[::-1], "{:,.0f}")
    ratio = max(values) / min(values)
    axes.set_xticks([])
    _style(axes, f"{title} (ratio {ratio:.0f})")
    axes.spines["bottom"].set_visible(False)


def _draw_bars(axes: Any, models: list[Model], values: list[float], told: str) -> None:
    names = ["student" if model.name == "distilled" and len(models) == 2 else model.name
             for model in models]  # fmt: skip
    bars = axes.barh(names, values, color=[COLOURS[model.name] for model in models], height=0.62)
    axes.bar_label(bars, [f" {told.format(value)}" for value in values], fontsize=10.5, color=INK)
    axes.margins(x=0.18)
