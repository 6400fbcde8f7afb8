"""What `downstream` gains by batches of rows of about equal length: time, and whether it costs any
quality.

    python -m benchmarks.fine_tuning [--model DIR]

The same checkpoint, data and steps, in the Trainer's random order and in ours, in turn, each in a
process of its own, a seed for each pair.
"""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path

import click

from benchmarks.distillation_helps import mean_and_deviation
from benchmarks.interleaved import Figures, alone
from benchmarks.report import RESULTS, SHARED, TEACHER, publish, table
from store.console import command_errors

FILES = {
    "pos": ("pos/en_ewt.train.tsv", "pos/en_ewt.dev.tsv"),
    "ner": ("ner/en_wikiann.train.tsv", "ner/en_wikiann.dev.tsv"),
    "classify": ("classify/en_sst2.train.tsv", "classify/en_sst2.dev.tsv"),
}
ANY, EQUAL = "any order", "equal length (ours)"
HEAD = ("task", "batches", "s", "times as fast", "macro F1 or entity F1, dev")


def fine_tuned(name: str, order: str, model: str, limit: int, epochs: int, seed: int) -> Figures:
    """Seconds, and the best score on dev."""
    from transformers import Trainer

    from downstream.classify import Classify
    from downstream.finetune import FineTuneSettings, fine_tune
    from downstream.tagging import Entities, PartsOfSpeech
    from downstream.task_trainer import TaskTrainer

    if order == ANY:
        TaskTrainer._get_train_sampler = Trainer._get_train_sampler  # type: ignore[assignment]
    task = {"pos": PartsOfSpeech, "ner": Entities, "classify": Classify}[name]()
    train, dev = (SHARED / "data" / path for path in FILES[name])
    settings = FineTuneSettings(epochs, seeds=1, seed=seed, limit=limit)
    begun = time.perf_counter()
    found = fine_tune(task, model, {"train": train, "dev": dev}, settings)
    return {"seconds": time.perf_counter() - begun, "dev": found["mean"]["dev"]["primary"]}


@click.command()
@click.option("--model", default=str(TEACHER))
@click.option("--limit", default=800, help="examples")
@click.option("--epochs", default=3)
@click.option("--seeds", default=3)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(model: str, limit: int, epochs: int, seeds: int, results: Path) -> None:
    """Fine-tune both ways for each task and seed, and print the table."""
    rows = []
    for name in FILES:
        found: dict[str, list[Figures]] = {ANY: [], EQUAL: []}
        for seed in range(seeds):
            for order, some in found.items():
                work = functools.partial(fine_tuned, name, order, model, limit, epochs, seed)
                some.append(alone(work))
        took = {
            order: statistics.median(f["seconds"] for f in some) for order, some in found.items()
        }
        for order, some in found.items():
            told = mean_and_deviation([figures["dev"] for figures in some])
            rows.append((name, order, took[order], took[ANY] / took[order], told))
    settings = (
        f"`python -m benchmarks.fine_tuning`; teacher minilm-mlm fine-tuned by `downstream` on"
        f" {limit} examples of English Web Treebank, WikiANN (en) and SST-2, {epochs} epochs in"
        f" batches of 16, all of their dev sets; medians of {seeds} interleaved processes, scoring"
        " included."
    )
    publish("Fine-tuning in batches of equal length", settings, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
