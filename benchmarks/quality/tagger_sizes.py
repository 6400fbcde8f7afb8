"""Scores, sizes and times of BiLSTM taggers of several widths, as in TinyMBERT's table.

    python -m benchmarks.quality.tagger_sizes --work DIR [--seeds N]

DIR is that of `benchmarks.reproduce tinymbert`, whose teacher, store and scores are taken.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.common.results import RESULTS, mean_and_deviation, publish, table
from benchmarks.latency import measured
from benchmarks.reproduce import tinymbert
from benchmarks.reproduce.reproduction import Reproduction
from benchmarks.reproduce.source import Arm, Scores, Work
from benchmarks.reproduce.steps import Steps
from benchmarks.reproduce.verdicts import of_tasks
from teachonce.support.console import command_errors

WIDTHS = ((50, 100), (100, 100), (50, 200), (100, 200))
HEAD = (
    "E", "H", "entity F1", "parameters, M", "of the teacher", "MB on disk",
    "batch, ms", "times as fast", "sentence, ms", "times as fast",
)  # fmt: skip
SPEED = ("--batch-size", "32", "--max-length", "128")  # batches as published


def sizes_table(scores: Scores, rows: list[dict[str, Any]]) -> str:
    """`scores` of "E,H" and of "teacher" in the order of `rows`, but the teacher first."""
    told = []
    teacher = rows[-1]
    for (name, found), row in zip(scores.items(), [teacher, *rows[:-1]], strict=True):
        (values,) = found.values()
        embeddings, _, states = name.partition(",")
        told.append([
            embeddings, states, mean_and_deviation(values), row["parameters"] / 1e6,
            f"1/{teacher['parameters'] / row['parameters']:.1f}", row["disk_bytes"] / 1e6,
            *(cell for key in ("batch_ms", "sentence_ms")
              for cell in (row["cpu"][key], teacher["cpu"][key] / row["cpu"][key])),
        ])  # fmt: skip
    return table(HEAD, told)


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(min=1), default=1)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(work: Path, seeds: int, results: Path) -> None:
    """Train D4.2 students of several widths, score and time them."""
    source = tinymbert.SMALL
    words = source.arms["D4.2"].words
    arms = {
        f"{embeddings},{states}": Arm((*words, "--student", f"bilstm:{embeddings},{states}"))
        for embeddings, states in WIDTHS
    }
    source = replace(source, arms=arms, claims=(), joined={})
    scores = of_tasks(source, Reproduction(source, Work(work, Steps()), seeds).scores())
    models = [work / f"{name}-0" for name in arms]
    rows = measured(models, work / "teacher/model", SPEED)
    settings = (
        f"`python -m benchmarks.quality.tagger_sizes --seeds {seeds}`; strategy D4.2 on the data of"
        f" `{source.title}`, word pieces 5k; float32 on a CPU, batches of 32 x 128"
        " tokens and single sentences of 32. Published (Table 16): from E 300, H 600 to 50, 100 F1"
        " falls from 88.6 to 84.6 and parameters from 1/5.6 of mBERT to 1/38; batches are 14 to 77"
        " times as fast on a GPU, single sentences 8 to 16 times on a CPU."
    )
    publish("Sizes of taggers", settings, sizes_table(scores, rows), results)


if __name__ == "__main__":
    main()
