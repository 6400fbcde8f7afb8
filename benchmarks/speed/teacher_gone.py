"""Time and memory of a student's step from the store, and with the teacher in memory.

    python -m benchmarks.speed.teacher_gone [--model DIR --corpus TEXT]

A small store is dumped first, with the features that the losses ask for. Each setting runs in a
process of its own, in turn and repeated; memory is the most that the process held after a step.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import on_small_store
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import parse_losses
from teachonce.support.console import command_errors


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def training(options: TrainOptions, model: str | None) -> Figures:
    """Some steps, with the teacher in memory if there is a `model`: seconds a step, student tokens
    a second, and the most memory after a step."""
    from benchmarks.speed.online_teacher import OnlineTeacher
    from teachonce.store import open_store
    from teachonce.student_train.prepared_student import prepare
    from teachonce.student_train.train.student_training import train
    from teachonce.teacher_dump.teacher.loading import load_teacher

    source: Any = open_store(options.store)
    network, collator, _ = prepare(options, source)
    if model:
        precision = str(source.identity["arguments"]["precision"])
        teacher = load_teacher(model, attention="none", device=options.device, precision=precision)
        source = OnlineTeacher(source, teacher)
    times, tokens, memory = [time.perf_counter()], list[float](), list[int]()

    def watch(_: int, found: dict[str, float]) -> None:
        times.append(time.perf_counter())
        tokens.append(found["tokens"])
        memory.append(resident())

    train(source, network, collator, options, on_step=watch)
    seconds = [after - before for before, after in zip(times[2:], times[3:], strict=False)]
    return {
        "seconds": statistics.median(seconds),
        "speed": statistics.median(n / s for n, s in zip(tokens[2:], seconds, strict=False)),
        "memory": max(memory) / 2**20,
    }


@click.command()
@of_text(60_000)
@click.option("--student", default="bert:128x2x2")
@click.option("--vocab", default="5k")
@click.option("--loss", default="mlm=1,hidden=30")
@click.option("--steps", default=10)
@click.option("--repeats", default=5)
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    student: str,
    vocab: str,
    loss: str,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the table and put it into RESULTS.md."""
    losses = parse_losses((loss,))
    logits = None if "kl" in losses else "none"
    settings = {"student": student, "vocab": vocab, "loss": losses, "steps": steps}
    with on_small_store(model, corpus, tokens, logits, **settings) as base:
        options = base.resolved()
        medians = interleaved(
            {
                "from the store": partial(training, options, None),
                "teacher in memory": partial(training, options, model),
            },
            repeats,
        )
    rows: list[list[object]] = [[name, *values.values()] for name, values in medians.items()]
    stored, resident_teacher = medians.values()
    rows.append(["ratio", *(resident_teacher[key] / stored[key] for key in stored)])
    publish(
        "The teacher is gone",
        f"`python -m benchmarks.speed.teacher_gone`; teacher {Path(model).name}, student"
        f" {student}, {vocab} WordPiece, {loss}, default batches and precision; medians of"
        f" {repeats} interleaved processes of {steps} steps. Both import the same libraries,"
        " which are most of the memory below.",
        table(["", "seconds a step", "student tokens/s", "memory while training, MB"], rows),
        results,
    )


if __name__ == "__main__":
    main()
