"""Speed of a student's step next to the plain step of transformers, and how long it waits.

    python -m benchmarks.speed.stepping [--model DIR --corpus TEXT]

The plain step: the same student and texts in random order, a fixed number of sequences padded to
the longest, masked by `DataCollatorForLanguageModeling`, the loss of `BertForMaskedLM`, AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import on_small_store
from teachonce.store import open_store
from teachonce.student_train.data.stream import prepared_batches
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import parse_losses
from teachonce.student_train.train import store_training
from teachonce.student_train.train.student_training import train
from teachonce.support.console import command_errors

WARM = 3  # steps that are not timed
HEAD = (
    "student",
    "",
    "student tokens/s",
    "times plain float32",
    "times plain bf16",
    "time waiting for data",
)


def ours(options: TrainOptions, warm: int = WARM) -> Figures:
    """Run Teachonce's loop; return tokens per second after `warm` steps, and the share of time
    spent waiting for a batch."""
    store = open_store(options.store)
    student, collator, _ = prepare(options, store)
    waited, times, tokens = list[float](), list[float](), list[float]()

    def watched(*order: Any) -> Iterator[Any]:
        with closing(prepared_batches(*order)) as batches:
            while True:
                started = time.perf_counter()
                batch = next(batches)
                waited.append(time.perf_counter() - started)
                yield batch

    def watch(_: int, metrics: dict[str, float]) -> None:
        times.append(time.perf_counter())
        tokens.append(metrics["tokens"])

    with mock.patch.object(store_training, "prepared_batches", watched):
        train(store, student, collator, options, on_step=watch)
    seconds = times[-1] - times[warm - 1]
    return {
        "speed": sum(tokens[warm:]) / seconds,
        "waiting": sum(waited[warm : len(times)]) / seconds,
    }


def plain(options: TrainOptions, sequences: int) -> Figures:
    """Train with transformers alone."""
    from transformers import DataCollatorForLanguageModeling

    store = open_store(options.store)
    student, collator, _ = prepare(options, store)
    tokenizer = collator.student_tokenizer
    masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=options.mask_prob)
    inputs = tokenizer(list(store.texts()), truncation=True)["input_ids"]

    def loss_of(indices: list[int]) -> torch.Tensor:
        loss: torch.Tensor = student(**masked([{"input_ids": inputs[i]} for i in indices])).loss
        return loss

    return plain_steps(student, options, loss_of, [len(ids) for ids in inputs], sequences)


def plain_steps(
    student: Any,
    options: TrainOptions,
    loss_of: Callable[[list[int]], torch.Tensor],
    sizes: Sequence[int],
    sequences: int,
) -> Figures:
    """Train with AdamW on `sequences` texts per step, in random order; return the tokens per
    second.

    loss_of: receives the indices of a step's texts. sizes: the tokens of each text.
    """
    student.set_attn_implementation("sdpa")  # the default of transformers
    order = np.random.default_rng(0).permutation(len(sizes))
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.resolved_lr)
    student.train()
    times, tokens = list[float](), list[int]()
    bf16 = options.precision == "bf16"
    for step in range(options.steps or 0):
        indices = order.take(range(step * sequences, (step + 1) * sequences), mode="wrap").tolist()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(indices)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        tokens.append(sum(sizes[i] for i in indices))
    return {"speed": sum(tokens[WARM:]) / (times[-1] - times[WARM - 1]), "waiting": 0.0}


def measure(base: TrainOptions, students: list[str], repeats: int) -> list[list[object]]:
    """Return a row for each setting. All have about the same number of tokens per batch."""
    rows: list[list[object]] = []
    for name in students:
        mlm = replace(base, student=name, loss=parse_losses(("mlm=1",)))
        fp32, bf16 = (replace(mlm, precision=p).resolved() for p in ("fp32", "bf16"))
        store = open_store(base.store)
        sequences = round(bf16.batch_tokens / (store.meta["tokens"] / len(store)))
        hidden = replace(bf16, loss=parse_losses(("mlm=1,hidden=30",)))
        settings = {
            "plain, float32": partial(plain, fp32, sequences),
            "plain, bf16": partial(plain, bf16, sequences),
            "ours, MLM, float32": partial(ours, fp32),
            "ours, MLM, bf16": partial(ours, bf16),
            "ours, MLM and states, span": partial(ours, replace(hidden, align="span")),
            "ours, MLM and states, reduce": partial(ours, replace(hidden, align="reduce")),
        }
        results = interleaved(settings, repeats)
        for label, figures in results.items():
            ratios = [
                f"{figures['speed'] / results[reference]['speed']:.2f}"
                for reference in ("plain, float32", "plain, bf16")
            ]
            waiting = "" if label.startswith("plain") else f"{figures['waiting']:.1%}"
            rows.append([name, label, f"{figures['speed']:,.0f}", *ratios, waiting])
    return rows


@click.command()
@of_text(60_000)
@click.option("--students", default="bert:128x2x2,bert:264x3x12")
@click.option("--vocab", default="5k")
@click.option("--batch-tokens", default=2048)
@click.option("--steps", default=20)
@click.option("--repeats", default=5)
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    students: str,
    vocab: str,
    batch_tokens: int,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the table and write it to RESULTS.md."""
    options: dict[str, Any] = {"vocab": vocab, "batch_tokens": batch_tokens, "steps": steps}
    with on_small_store(model, corpus, tokens, **options) as base:
        rows = measure(base, students.split(","), repeats)
    publish(
        "A student's step",
        "`python -m benchmarks.speed.stepping`. Our training loop is compared with a plain script"
        f" that uses transformers alone. Teacher: {Path(model).name}, {tokens:,} tokens in windows"
        f" of at most 128. Students: {vocab} WordPiece, about {batch_tokens:,} tokens per batch."
        f" Tokens/s do not count padding. Medians of {repeats} interleaved processes of {steps}"
        " steps.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
