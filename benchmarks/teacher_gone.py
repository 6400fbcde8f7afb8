"""What a student step costs from the store, and with the teacher in memory.

    python -m benchmarks.teacher_gone [--model DIR --corpus TEXT]

A small store is dumped first, with the features that the losses ask for. Each setting runs in a
process of its own, in turn and repeated; memory is the most that the process held after a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.report import NOVELS, TEACHER, publish, table
from store.console import command_errors


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_process(
    store: str, model: str | None, student: str, vocab: str, loss: str, steps: int
) -> None:
    """Train some steps and print seconds a step, tokens a second and peak memory as JSON."""
    from benchmarks.online import OnlineTeacher
    from store import open_store
    from student_train.options import TrainOptions, parse_losses
    from student_train.run import prepare
    from student_train.trainer import train
    from teacher_dump.teacher import load_teacher

    source: Any = open_store(store)
    options = TrainOptions(
        store=store,
        student=student,
        vocab=vocab,
        loss=parse_losses((loss,)),
        steps=steps,
        view=0,
        held_out=0.0,
    ).resolved()
    network, collator, _ = prepare(options, source)
    if model:
        precision = str(source.identity["arguments"]["precision"])
        teacher = load_teacher(model, attention="none", precision=precision)
        source = OnlineTeacher(source, teacher)
    times, tokens, memory = [time.perf_counter()], list[float](), list[int]()

    def watch(_: int, found: dict[str, float]) -> None:
        times.append(time.perf_counter())
        tokens.append(found["tokens"])
        memory.append(resident())

    train(source, network, collator, options, on_step=watch)
    seconds = [after - before for before, after in zip(times[2:], times[3:], strict=False)]
    result = {
        "seconds": statistics.median(seconds),
        "speed": statistics.median(n / s for n, s in zip(tokens[2:], seconds, strict=False)),
        "memory": max(memory) / 2**20,
    }
    print(json.dumps(result))


def small_store(model: str, corpus: str, tokens: int, out: Path) -> None:
    """The teacher's states and logits of some tokens."""
    from teacher_dump.dump import dump
    from teacher_dump.options import DumpOptions

    options = DumpOptions(
        model=model, corpus=(corpus,), out=out, limit=tokens, attention="none", max_length=128
    )
    dump(options)


def child_process(words: list[str]) -> dict[str, float]:
    """What one setting found in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.teacher_gone", *words, "--child"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


@click.command()
@click.option("--model", default=str(TEACHER) if TEACHER.exists() else "minilm")
@click.option("--corpus", default=str(NOVELS) if NOVELS.exists() else "python-docs")
@click.option("--tokens", default=60_000)
@click.option("--student", default="128x2x2")
@click.option("--vocab", default="5k")
@click.option("--loss", default="mlm=1,hidden=30")
@click.option("--steps", default=10)
@click.option("--repeats", default=5)
@click.option("--child", is_flag=True, hidden=True)
@click.option("--resident", is_flag=True, hidden=True)
@click.option("--store", hidden=True)
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
    child: bool,
    resident: bool,
    store: str,
) -> None:
    """Print the table and put it into RESULTS.md."""
    if child:
        one_process(store, model if resident else None, student, vocab, loss, steps)
        return
    runs: dict[str, list[dict[str, float]]] = {"from the store": [], "teacher in memory": []}
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store.zarr"
        small_store(model, corpus, tokens, Path(store))
        words = ["--model", model, "--student", student, "--vocab", vocab, "--loss", loss]
        words += ["--steps", str(steps), "--store", store]
        for _ in range(repeats):
            for name, found in runs.items():
                found.append(child_process([*words, *["--resident"] * (name != "from the store")]))
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in runs.items()
    }
    rows: list[list[object]] = [[name, *values.values()] for name, values in medians.items()]
    stored, resident_teacher = medians.values()
    rows.append(["ratio", *(resident_teacher[key] / stored[key] for key in stored)])
    publish(
        "The teacher is gone",
        f"`python -m benchmarks.teacher_gone`; teacher {Path(model).name}, student"
        f" {student}, {vocab} WordPiece, {loss}, default batches and precision; medians of"
        f" {repeats} interleaved processes of {steps} steps. Both import the same libraries,"
        " which are most of the memory below.",
        table(["", "seconds a step", "student tokens/s", "memory while training, MB"], rows),
    )


if __name__ == "__main__":
    main()
