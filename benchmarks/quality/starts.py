"""Where a student of its teacher's kind starts: from which of the teacher's layers.

    python -m benchmarks.quality.starts --work DIR [--seeds N] [--starts NAME,...]

A student has fewer layers than its teacher. Each of its layers stands for a group of layers that
follow one another there, and starts from their mean (`teacher`), from the first of them or from the
last, whole where it is as wide, or cut. What is finished in --work is not made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.common.results import mean_and_deviation, of_text, publish, table
from benchmarks.quality.distillation_helps import EWT, finished, with_tags
from teachonce.checkpoints.declared import layers_of
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.model.teacher_layers import layer_groups
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import parse_student
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

STUDENTS = {"bert:128x2x2": 800, "bert:192x3x6": 400, "bert:384x3x12": 200}
"""Shapes up to the width of the teacher, and the steps of each."""

MEASURES = {"mlm": "MLM nats/token", "tuned": "fine-tuned accuracy"}
PLACES = {"first": 0, "last": -1}  # in a group of layers
STARTS = ("teacher", *PLACES)


def start_of(name: str, teacher_layers: int, layers: int) -> str:
    """Return the --init of a start: of the first or the last layer of each group; any other name is
    one."""
    if name not in PLACES:
        return name
    groups = layer_groups("", teacher_layers, layers)
    return f"layers:{','.join(str(group[PLACES[name]]) for group in groups)}"


def rows_of(
    base: TrainOptions, starts: Sequence[str], seeds: int, store: FeatureStore, work: Path
) -> list[list[object]]:
    """Train and judge the students of each start; a line for each."""
    tags = (Path(f"{EWT}.train.tsv"), Path(f"{EWT}.dev.tsv"))
    teacher_layers = layers_of(store.teacher_settings("config.json"))
    assert teacher_layers is not None  # students are cut out of teachers of known kinds alone
    rows = list[list[object]]()
    for (student, steps), name in itertools.product(STUDENTS.items(), starts):
        init = start_of(name, teacher_layers, parse_student(student).layers)
        asked = replace(base, student=student, steps=steps, init=init)
        folders = [
            finished(f"{student} {name}", replace(asked, seed=seed), store, work)
            for seed in range(seeds)
        ]
        scores = [with_tags(folder, tags) for folder in folders]
        found = ([of_seed[each] for of_seed in scores] for each in MEASURES)
        rows.append([student, steps, name, init, *map(mean_and_deviation, found)])
    return rows


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@of_text(200_000)
@click.option("--vocab", default="5k")
@click.option("--starts", default=",".join(STARTS))
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@command_errors
def main(
    work: Path,
    model: str,
    corpus: str,
    tokens: int,
    vocab: str,
    starts: str,
    seeds: int,
    results: Path,
) -> None:
    """Train students from each start by the default losses, and judge them."""
    work.mkdir(parents=True, exist_ok=True)
    path, vocabulary = work / "store.zarr", work / f"vocabulary-{vocab}"
    dump(DumpOptions(model=model, corpus=(corpus,), out=path, limit=tokens, views=2))
    with closing(open_store(path)) as store:
        if not vocabulary.exists():
            student_tokenizer(vocab, store).save_pretrained(vocabulary)
        base = TrainOptions(
            store=str(path), vocab=str(vocabulary), view=0, held_out=0.04, eval_every=10**9,
            precision="bf16",
        )  # fmt: skip
        rows = rows_of(base, starts.split(","), seeds, store, work)
    about = (
        f"`python -m benchmarks.quality.starts --seeds {seeds}`; teacher {Path(model).name},"
        f" {tokens:,} tokens of {Path(corpus).name}, {vocab} WordPiece, the default losses and"
        " rate, 1,024 teacher tokens a step; held-out masked-LM loss, parts of speech (EWT)"
        " after fine-tuning."
    )
    head = ("student", "steps", "start", "--init", *MEASURES.values())
    publish("Where a student starts", about, table(head, rows), results)


if __name__ == "__main__":
    main()
