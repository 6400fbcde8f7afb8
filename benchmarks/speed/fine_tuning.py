"""Time and quality of fine-tuning with `downstream --group-by-length`, and without.

    python -m benchmarks.speed.fine_tuning [--model DIR]

The same checkpoint, data and steps with it and without, in turn, each in a process of its own, a
seed for each pair.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path

import click

from benchmarks.common.interleaved import Figures, alone
from benchmarks.common.results import RESULTS, TEACHER, mean_and_deviation, publish, table
from benchmarks.reproduce.examples import Data
from benchmarks.reproduce.zhao import EXAMPLES
from teachonce.support.console import command_errors

ORDERS = {"any order": False, "`--group-by-length`": True}
HEAD = ("measure", "batches", "s", "times as fast", "on dev")


def fine_tuned(
    data: Data, grouped: bool, model: str, work: Path, epochs: int, seed: int
) -> Figures:
    """Seconds, and the best score on dev."""
    from teachonce.downstream.settings import FineTuneSettings
    from teachonce.downstream.tasks.classify import Classify
    from teachonce.downstream.tasks.fine_tune import fine_tune
    from teachonce.downstream.tasks.tagging import Entities

    task = Entities() if data.task == "ner" else Classify()
    files = {name: work / f"{data.name}.{name}.tsv" for name in ("train", "dev")}
    settings = FineTuneSettings(epochs, seeds=1, seed=seed, group_by_length=grouped)
    begun = time.perf_counter()
    found = fine_tune(task, model, files, settings)
    return {"seconds": time.perf_counter() - begun, "dev": found["mean"]["dev"]["primary"]}


@click.command()
@click.option("--model", default=str(TEACHER))
@click.option("--epochs", default=2)
@click.option("--seeds", default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(model: str, epochs: int, seeds: int, results: Path) -> None:
    """Fine-tune both ways for each task and seed, and print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for data in EXAMPLES:
            data.cut(Path(folder))
            found: dict[str, list[Figures]] = {order: [] for order in ORDERS}
            for seed in range(seeds):
                for order, grouped in ORDERS.items():
                    settings = (data, grouped, model, Path(folder), epochs, seed)
                    found[order].append(alone(functools.partial(fine_tuned, *settings)))
            took = [statistics.median(each["seconds"] for each in some) for some in found.values()]
            for (order, some), seconds in zip(found.items(), took, strict=True):
                told = mean_and_deviation([each["dev"] for each in some])
                rows.append((data.measure, order, seconds, took[0] / seconds, told))
    said = (
        f"`python -m benchmarks.speed.fine_tuning`; {Path(model).name} fine-tuned by"
        f" `downstream` on 800"
        f" examples (2,000 of slots), scored on 200, {epochs} epochs in batches of 16; medians of"
        f" {seeds} interleaved processes, from reading the files to the last score."
    )
    publish("Fine-tuning in batches of equal length", said, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
