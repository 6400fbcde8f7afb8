"""The results of the search, in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.demo.passages import QUESTIONS
from benchmarks.demo.searching import Model, Search

SHOWN = 5  # passages of a question
CHARACTERS = 110  # of a passage


def show_answers(search: Search, questions: Sequence[str], console: Console) -> None:
    """Print the best passages of each question by teacher and student, side by side."""
    answers = zip(
        questions, search.teacher.best(questions), search.student.best(questions), strict=True
    )
    for question, teacher, student in answers:
        table = Table(
            title=f'"{question}"',
            title_justify="left",
            title_style="bold",
            expand=True,
            show_lines=True,
        )
        table.add_column("teacher", ratio=1)
        table.add_column("student (in brackets: the teacher's place)", ratio=1)
        for t, s in zip(teacher[:SHOWN], student[:SHOWN], strict=True):
            rank = f"({teacher.index(s) + 1}) " if s in teacher else "(-) "
            table.add_row(_cell(search.passages[t]), _cell(search.passages[s], rank))
        console.print(table)


def _cell(passage: str, rank: str = "") -> Text:
    name, _, text = passage.partition(": ")
    short = textwrap.shorten(text, CHARACTERS, placeholder="...")
    return Text.assemble(rank, (name, "bold"), f" {short}")


def show_models(models: Sequence[Model], passages: int, console: Console) -> None:
    """Print size, speed and agreement with the teacher's ranking as a table."""
    teacher = models[0]
    table = Table(title=f"{len(QUESTIONS)} questions to {passages:,} passages, CPU")
    table.add_column("model")
    for head in ("parameters", "MB", "passages/s", "nDCG@10"):
        table.add_column(head, justify="right")
    for model in models:
        smaller = teacher.parameters / model.parameters
        faster = model.passages_per_second / teacher.passages_per_second
        is_student = model is not teacher
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:.1f}M" + (f" (1/{smaller:.0f})" if is_student else ""),
            f"{model.megabytes:.1f}",
            f"{model.passages_per_second:,.0f}" + (f" (x{faster:.0f})" if is_student else ""),
            f"{model.agreement:.2f}",
        )
    console.print(table)
    console.print(
        "nDCG@10: how far the ranking is the teacher's, whose ten best passages have the grades 10"
        " to 1. The student was trained on the passages alone, not on these questions. In the last"
        " row the student embeds the questions, and the teacher's vectors are searched.",
        highlight=False,
    )
