"""Time of K students from one dump, and with the teacher in memory.

    python -m benchmarks.speed.economy [--corpus TEXT]

A dump, a student from it and a student with the teacher resident are measured in processes of their
own; K students are K times one. Libraries are loaded in each of them and are not counted.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import NOVELS, RESULTS, TEACHER, publish, table
from benchmarks.common.small_store import on_small_store, random_teacher, small_store
from benchmarks.speed.teacher_gone import training
from teachonce.student_train.settings.loss_weights import parse_losses
from teachonce.support.console import command_errors

STUDENTS = (1, 4, 10)
EPOCHS = 10  # of a student
LOSS = "mlm=1,hidden=30"
HEAD = (
    "teacher",
    "dump, s",
    "a student, s",
    "with its teacher, s",
    *(f"K={k}" for k in STUDENTS),
    "K to infinity",
    "even at K",
)


def dumped(model: str, corpus: str, tokens: int) -> Figures:
    """Seconds of a dump, the teacher loaded before it."""
    from teachonce.teacher_dump.teacher.teacher import load_teacher

    load_teacher(model, attention="none")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        small_store(model, corpus, tokens, Path(folder) / "store.zarr")
        return {"seconds": time.perf_counter() - begun}


def measure(name: str, model: str, corpus: str, tokens: int, students: Any, repeats: int) -> Any:
    """A row of the table."""
    with on_small_store(model, corpus, tokens, **students) as base:
        options = base.resolved()
        found = interleaved(
            {
                "dump": partial(dumped, model, corpus, tokens),
                "stored": partial(training, options, None),
                "resident": partial(training, options, model),
            },
            repeats,
        )
    steps = EPOCHS * tokens / options.batch_tokens
    dump = found["dump"]["seconds"]
    stored, resident = (steps * found[key]["seconds"] for key in ("stored", "resident"))
    ratios = [k * resident / (dump + k * stored) for k in STUDENTS]
    even = dump / (resident - stored) if resident > stored else float("inf")
    told = [f"{ratio:.2f}x" for ratio in (*ratios, resident / stored)]
    return [name, f"{dump:.1f}", f"{stored:.1f}", f"{resident:.1f}", *told, f"{even:.2f}"]


@click.command()
@click.option("--corpus", default=str(NOVELS) if NOVELS.exists() else "python-docs")
@click.option("--tokens", default=20_000)
@click.option("--student", default="128x2x2")
@click.option("--vocab", default="2k")
@click.option("--steps", default=10)
@click.option("--repeats", default=5)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(
    corpus: str,
    tokens: int,
    student: str,
    vocab: str,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the table and put it into RESULTS.md."""
    minilm = str(TEACHER) if TEACHER.exists() else "minilm"
    students = {"student": student, "vocab": vocab, "loss": parse_losses((LOSS,)), "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        base = random_teacher(Path(folder), minilm)
        rows = [
            measure(name, model, corpus, tokens, students, repeats)
            for name, model in (("MiniLM, 6x384", minilm), ("BERT-base size, 12x768", base))
        ]
    publish(
        "Economy",
        f"`python -m benchmarks.speed.economy`; {tokens:,} tokens, student {student}, {vocab}"
        f" WordPiece,"
        f" {LOSS}, {EPOCHS} epochs; a student's time is that of its steps (medians of {repeats}"
        f" interleaved processes of {steps}); K=4: four students with the teacher in memory take so"
        " many times as long as a dump and four students from it.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
