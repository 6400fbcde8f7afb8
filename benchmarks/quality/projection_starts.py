"""Which start, mode and reduction of the loss of states leave a student that works.

    python -m benchmarks.quality.projection_starts --work DIR [--seeds N] [--steps N,N,...]

Kolesnikova et al. 2022 start the projections by He et al. 2015, frozen and trained, and find the
best student with MLM and squared errors of states alone, by reduce, through a frozen one. The
reduction of their squared error is open: a sum over the channels, as their published code has it,
or a mean, as a mean squared error is by default. What is finished in --work is not made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.common.results import mean_and_deviation, of_text, publish, table
from benchmarks.quality.distillation_helps import EWT, finished, with_tags
from teachonce.store import FeatureStore, open_store
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.evaluate import VARYING
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

MEASURES = {"mlm": "MLM nats/token", "tuned": "fine-tuned accuracy", VARYING: "share that varies"}
MODES, START_NAMES = ("trainable", "frozen"), ("he", "pytorch")
REDUCED = {"sum": "hidden-raw-sum", "mean": "hidden-raw"}  # over the channels
WEIGHTS = {"mlm": 0.5, "states": 0.1}  # of the published code
TAGS = (Path(f"{EWT}.train.tsv"), Path(f"{EWT}.dev.tsv"))
HEAD = ("steps", "projection", "start", "over channels", *MEASURES.values())


Arm = tuple[int, str, str, str]
"""The steps of a student, and mode, start and reduction of its losses of states."""


def _arms(steps: Sequence[int]) -> Iterator[Arm]:
    for length in steps:
        yield length, "", "", "MLM alone"
    yield from itertools.product(steps, MODES, START_NAMES, REDUCED)


def _row(arm: Arm, base: TrainOptions, store: FeatureStore, work: Path, seeds: int) -> list[object]:
    """Train and judge the students of an arm, one for each seed."""
    length, mode, start, over = arm
    options = replace(base, steps=length)
    if mode:
        losses = {"mlm": WEIGHTS["mlm"], REDUCED[over]: WEIGHTS["states"]}
        options = replace(options, loss=losses, projection=mode, projection_start=start)
    name = " ".join(filter(None, (f"{length}", mode, start, over)))
    folders = [finished(name, replace(options, seed=seed), store, work) for seed in range(seeds)]
    scores = [with_tags(folder, TAGS) for folder in folders]
    found = [[each[key] for each in scores if key in each] for key in MEASURES]
    return [*arm, *(mean_and_deviation(each) if each else "" for each in found)]


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True)
@of_text(200_000)
@click.option("--vocab", default="5k")
@click.option("--student", default="bert:128x2x2")
@click.option("--steps", default="120,400,1600")
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@command_errors
def main(
    work: Path,
    model: str,
    corpus: str,
    tokens: int,
    vocab: str,
    student: str,
    steps: str,
    seeds: int,
    results: Path,
) -> None:
    """Train a student of each start, mode, reduction and length, and judge it."""
    work.mkdir(parents=True, exist_ok=True)
    path, vocabulary = work / "store.zarr", work / f"vocabulary-{vocab}"
    dump(DumpOptions(model=model, corpus=(corpus,), out=path, limit=tokens, hidden="mean", views=2))
    with closing(open_store(path)) as store:
        if not vocabulary.exists():
            student_tokenizer(vocab, store).save_pretrained(vocabulary)
        base = TrainOptions(
            store=str(path), vocab=str(vocabulary), student=student, view=0, align="reduce",
            init="teacher", held_out=0.04, precision="bf16", lr=4e-3, eval_every=10**9,
            loss={"mlm": 0.5},
        )  # fmt: skip
        rows = [_row(arm, base, store, work, seeds) for arm in _arms([*map(int, steps.split(","))])]
    about = (
        f"`python -m benchmarks.quality.projection_starts --seeds {seeds}`; teacher"
        f" {Path(model).name}, {tokens:,} tokens of {Path(corpus).name}, {vocab} WordPiece, student"
        f" {student} from means of the teacher's layers, reduce, MLM x 0.5 and squared errors of"
        " mean states x 0.1, lr 4e-3; held-out masked-LM loss, parts of speech (EWT) after"
        " fine-tuning, and the share of the squared length of the student's states that is about"
        " their mean: 0 if they are all equal."
    )
    publish("Projections: start, mode and reduction", about, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
