"""Time of tokenising, aligning and pooling, alone and as shares of a training step.

    python -m benchmarks.speed.aligning [--model DIR --corpus TEXT]

One thread. A small store is dumped first. Tokens are the student's.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch

from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import on_small_store
from teachonce.align import Tokens, align_span
from teachonce.store import Batch, FeatureStore, open_store
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.pooling import Runs
from teachonce.student_train.data.token_cache import token_table
from teachonce.student_train.output.run import prepare
from teachonce.student_train.settings.alignments import ALIGNMENTS, Sides
from teachonce.student_train.settings.loss_weights import parse_losses
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import train
from teachonce.support.console import command_errors

BATCH = 16_384  # teacher tokens of a batch that is aligned alone
LOSS = "mlm=1,hidden=30"
WAYS = ("embedding_bag (ours)", "index_add", "segment_reduce", "scatter_reduce")


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median of some calls, after one that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def sides_of(batch: Batch, collator: Collator) -> Sides:
    """Copy texts and tokens of a batch, which is gone when the next one comes."""
    ids, offsets, special, start = (
        values.copy() for values in (batch.token_ids, batch.offsets, batch.special, batch.start)
    )
    return Sides(
        list(batch.texts),
        Tokens(ids, offsets, special, start),
        collator._native(batch),
        collator.vocabulary,
        collator.max_length,
    )


def aligned(how: str, batches: list[Sides]) -> Callable[[], object]:
    """Align all batches, whose student tokens are known."""

    def work() -> None:
        for sides in batches:
            ALIGNMENTS[how].align(replace(sides))  # a copy has not joined its texts yet

    return work


def alignments(base: TrainOptions, store: FeatureStore, repeats: int) -> list[list[object]]:
    """A row for each strategy: its speed on large batches, and its share of a training step."""
    rows: list[list[object]] = []
    for how in ALIGNMENTS:
        options = replace(base, align=how).resolved()
        student, collator, _ = prepare(options, store)
        large, small = (
            [sides_of(batch, collator) for batch in store.stream(0, 0, size, features=())]
            for size in (BATCH, options.batch_tokens)
        )
        tokens = sum(len(sides.student.ids) for sides in large)
        speed = tokens / seconds(aligned(how, large), repeats)
        each = seconds(aligned(how, small), repeats) / len(small)
        times: list[float] = []

        def watch(*_: Any, times: list[float] = times) -> None:
            times.append(time.perf_counter())

        train(store, student, collator, options, on_step=watch)
        step = float(np.median(np.diff(times[2:])))
        rows.append([how, f"{speed / 1e6:.1f}M", f"{each * 1e3:.2f} ms", f"{each / step:.1%}"])
    return rows


def pooled(how: str, runs: Runs, values: torch.Tensor) -> Callable[[], object]:
    """The mean of each run, and its gradient."""
    lengths = torch.diff(runs.begin, append=torch.tensor([len(runs.member)]))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def mean() -> torch.Tensor:
        if how == WAYS[0]:
            return runs.pool(values, "mean")
        if how == "segment_reduce":
            return torch.segment_reduce(values[runs.member], "mean", lengths=lengths)
        zero = values.new_zeros(len(lengths), values.shape[1])
        if how == "index_add":
            return zero.index_add(0, segment, values[runs.member]) / lengths[:, None]
        index = segment[:, None].expand(-1, values.shape[1])
        return zero.scatter_reduce(0, index, values[runs.member], "mean", include_self=False)

    def work() -> None:
        values.grad = None
        mean().sum().backward()

    return work


def poolings(sides: Sides, repeats: int) -> list[list[object]]:
    """A row for each way to pool, on the student's side of the runs of `span`."""
    native = sides.student
    runs = Runs.of(align_span(sides.text, sides.teacher, native).student)
    rows: list[list[object]] = []
    for width in (128, 384):
        values = torch.randn(len(native.ids), width, requires_grad=True)
        times = {how: seconds(pooled(how, runs, values), repeats) for how in WAYS}
        for how, each in times.items():
            speed = len(native.ids) / each
            rows.append([width, how, f"{speed / 1e6:.2f}M", f"{each / times[WAYS[0]]:.2f}"])
    return rows


def tokenising(store: FeatureStore, collator: Collator) -> str:
    """Once for a vocabulary, and every time after that."""
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, {"TEACHONCE_CACHE": cache}),
    ):
        begun = time.perf_counter()
        tokens = len(token_table(store, collator.tokenizer).ids)
        middle = time.perf_counter()
        token_table(store, collator.tokenizer)
        end = time.perf_counter()
    return (
        f"Tokenising the store for a vocabulary: {tokens / (middle - begun):,.0f} tokens/s the"
        f" first time, {tokens / (end - middle) / 1e6:.1f}M tokens/s from the cache after that (its"
        " checksum included)."
    )


@click.command()
@of_text(60_000)
@click.option("--student", default="128x2x2")
@click.option("--vocab", default="5k")
@click.option("--steps", default=20)
@click.option("--repeats", default=7)
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    student: str,
    vocab: str,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the tables and put them into RESULTS.md."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "student": student,
        "vocab": vocab,
        "loss": parse_losses((LOSS,)),
        "steps": steps,
    }
    with on_small_store(model, corpus, tokens, **options) as base:
        store = open_store(base.store)
        rows = alignments(base, store, repeats)
        _, collator, _ = prepare(base.resolved(), store)
        sides = sides_of(next(iter(store.stream(0, 0, BATCH, features=()))), collator)
        body = [
            table(("alignment", "student tokens/s", "a step's batch", "of a step"), rows),
            table(
                ("width", "mean of each run and its gradient", "student tokens/s", "time"),
                poolings(sides, repeats),
            ),
            tokenising(store, collator),
        ]
    publish(
        "Aligning",
        f"`python -m benchmarks.speed.aligning`; teacher {Path(model).name}, {tokens:,}"
        f" tokens, student"
        f" {student}, {vocab} WordPiece, {LOSS}, one thread; large batches of {BATCH:,} teacher"
        f" tokens, steps of {base.resolved().batch_tokens:,}; medians of {repeats}.",
        "\n\n".join(body),
        results,
    )


if __name__ == "__main__":
    main()
