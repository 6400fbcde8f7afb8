"""What a student step costs from the store, and with the teacher in memory.

    python -m benchmarks.teacher_gone --store STORE --model DIR

Each setting runs in a process of its own, in turn and repeated: peak memory is that of the process.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.report import SHARED, publish, table


def one_process(store: str, model: str | None, student: str, loss: str, steps: int) -> None:
    """Train some steps and print seconds a step, tokens a second and peak memory as JSON."""
    from benchmarks.online import OnlineTeacher
    from store import open_store
    from student_train.options import TrainOptions, parse_losses
    from student_train.run import prepare
    from student_train.trainer import train
    from teacher_dump.teacher import load_teacher

    source: Any = open_store(store)
    options = TrainOptions(
        store=store, student=student, loss=parse_losses((loss,)), steps=steps, view=0, held_out=0.0
    ).resolved()
    network, collator = prepare(options, source)
    if model:
        attention = "mean" if source.features.attention else "none"
        source = OnlineTeacher(source, load_teacher(model, attention=attention))
    times, tokens = [time.perf_counter()], []
    train(
        source,
        network,
        collator,
        options,
        on_step=lambda _, found: (
            times.append(time.perf_counter()),
            tokens.append(found["tokens"]),
        ),
    )
    seconds = [after - before for before, after in zip(times[2:], times[3:], strict=False)]
    result = {
        "seconds": statistics.median(seconds),
        "speed": statistics.median(n / s for n, s in zip(tokens[2:], seconds, strict=False)),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    print(json.dumps(result))


@click.command()
@click.option("--store", required=True)
@click.option(
    "--model", default=str(SHARED / "models/minilm-mlm"), help="The teacher of the store."
)
@click.option("--student", default="128x2x2")
@click.option("--loss", default="mlm=1,kl=1,hidden=3")
@click.option("--steps", default=10)
@click.option("--repeats", default=5)
@click.option("--child", is_flag=True, hidden=True)
@click.option("--resident", is_flag=True, hidden=True)
def main(
    store: str,
    model: str,
    student: str,
    loss: str,
    steps: int,
    repeats: int,
    child: bool,
    resident: bool,
) -> None:
    """Print the table and put it into RESULTS.md."""
    if child:
        one_process(store, model if resident else None, student, loss, steps)
        return
    found: dict[str, list[dict[str, float]]] = {"from the store": [], "teacher in memory": []}
    command = [sys.executable, "-m", "benchmarks.teacher_gone", *sys.argv[1:], "--child"]
    for _ in range(repeats):
        for name in found:
            words = [*command, "--resident"] if name == "teacher in memory" else command
            output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(output.splitlines()[-1]))
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    rows: list[list[object]] = [[name, *values.values()] for name, values in medians.items()]
    stored, resident_teacher = medians.values()
    rows.append(["ratio", *(resident_teacher[key] / stored[key] for key in stored)])
    publish(
        "The teacher is gone",
        f"`python -m benchmarks.teacher_gone`; teacher {Path(model).name}, student {student}, 5k"
        f" WordPiece, {loss}, default batches and precision; medians of {repeats} interleaved"
        f" processes of {steps} steps.",
        table(["", "seconds a step", "student tokens/s", "peak memory, MB"], rows),
    )


if __name__ == "__main__":
    main()
