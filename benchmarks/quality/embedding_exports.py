"""Exports of students of sentence embeddings: what they keep, and what they cost on one thread.

    python -m benchmarks.quality.embedding_exports STUDENT... [--check TABLE]

Each student's folder is exported to ONNX in float32 and in int8, whatever it keeps. The teacher
stands above them. Each figure is taken in a process of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from benchmarks.common.results import RESULTS, SHARED, publish, table
from benchmarks.quality.embedding_peers import folder_of
from teachonce.student_export.cards import Exported
from teachonce.student_export.job import export
from teachonce.student_export.options import ExportOptions
from teachonce.support.console import command_errors

HEAD = (
    "model", "file", "MB", "Spearman", "of the student's", "loads in, s", "one text, ms",
    "texts/s in batches of 16", "memory, MB",
)  # fmt: skip
KINDS = {"float32": None, "int8": "int8"}


def exported(folder: Path, kind: str, check: Path, scratch: Path) -> Exported:
    """Export a copy of a folder to ONNX: an export writes into the card of what it exports."""
    copy = scratch / "copy"
    shutil.copytree(folder, copy)
    options = ExportOptions(
        copy, scratch / "out", to=("onnx",), quantize=KINDS[kind], check=check, least=0.01
    )
    (made,) = export(options, say=click.echo)
    return made


def row(name: str, kind: str, made: Exported) -> list[object]:
    figures, score = made.figures, made.score
    assert score is not None  # a table of scores is the check
    memory = "" if figures.memory is None else f"{figures.memory / 1e6:.0f}"
    return [
        name, f"ONNX, {kind}", f"{figures.bytes / 1e6:.2f}", f"{score:.4f}",
        f"{made.keeps:.1%}", f"{figures.load_s:.2f}", f"{figures.sentence_ms:.2f}",
        f"{figures.per_second:,.0f}", memory,
    ]  # fmt: skip


@click.command()
@click.argument("students", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option("--model", default="minilm", help="The teacher.")
@click.option(
    "--check", type=click.Path(path_type=Path), default=SHARED / "data/sts/stsb_en.dev.tsv"
)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(students: tuple[Path, ...], model: str, check: Path, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    rows = []
    folders = {model: Path(folder_of(model)), **{each.name: each for each in students}}
    for name, folder in folders.items():
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(row(name, kind, exported(folder, kind, check, Path(scratch))))
    settings = (
        f"`python -m benchmarks.quality.embedding_exports`; `student-export --to onnx`, scored on"
        f" {check.name}; one thread of a CPU, each in a process of its own; memory beyond that of"
        " the libraries; the seed stands behind a student's shape."
    )
    publish("Exports of students of sentence embeddings", settings, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
