"""Speed of a decoder student's step from a store, and of the ways with the teacher's tokens.

    python -m benchmarks.speed.decoders --model DIR [--corpus TEXT]

All ways train a student of the same shape on the same texts; a second's teacher tokens say how much
text is read. Plain steps are those of a straightforward script: texts in random order, a fixed
number of sequences padded to the longest, AdamW. All compute in bf16 where the hardware multiplies
it, else in float32.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import NOVELS, publish, results_option, table
from benchmarks.common.small_store import small_store
from benchmarks.speed.stepping import ours, plain_steps
from teachonce.store import open_store
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.option_fields import loss_words
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.terms import NEXT_LOSS, parse_losses
from teachonce.support.console import command_errors

TOP = 64
STUDENTS, TOKENS, STORED = 10, 2_000_000, 400_000
IGNORED = -100
"""Label of a token that is not predicted, as in transformers."""
HEAD = ("vocabulary, targets", "teacher tokens/s", "times the first row", "time waiting for data")
HOURS = ("way", "dump, h", f"{STUDENTS} students, h", "total, h", "times ours")
Loss = Callable[[Any, Tensor, Tensor, list[int]], Tensor]
"""Takes the student, ids and attention mask, [B,S], and the indices of the texts in the store."""


def from_store(options: TrainOptions) -> Figures:
    """Run our loop; return teacher tokens per second."""
    figures = ours(options)
    with open_store(options.store) as store:
        _, collator, _ = prepare(options, store)
        texts = list(store.texts())
        tokens = sum(map(len, collator.student_tokenizer(texts)["input_ids"]))
        return {**figures, "speed": figures["speed"] * store.meta["tokens"] / tokens}


def plain(options: TrainOptions, make: Callable[[TrainOptions], Loss]) -> Figures:
    """Run a straightforward script that trains the same student with the loss that `make`
    returns."""
    with open_store(options.store) as store:
        student, collator, _ = prepare(options, store)
        texts, sizes = list(store.texts()), [len(record.token_ids) for record in store]
    inputs = collator.student_tokenizer(texts, truncation=True)["input_ids"]
    loss_of = make(options)

    def loss_of_texts(indices: list[int]) -> Tensor:
        rows = [torch.tensor(inputs[i]) for i in indices]
        ids, mask = (
            pad_sequence(values, batch_first=True)
            for values in (rows, [torch.ones_like(r) for r in rows])
        )
        return loss_of(student, ids, mask, indices)

    sequences = round(options.batch_tokens * len(texts) / sum(sizes))
    return plain_steps(student, options, loss_of_texts, sizes, sequences)


def _next(student: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the next tokens, and the logits, [B,S,V]."""
    output = student(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, IGNORED))
    return output.loss, output.logits


def text_alone(options: TrainOptions) -> Loss:
    """Compute cross-entropy, by the loss of transformers."""
    return lambda student, ids, mask, indices: _next(student, ids, mask)[0]


def stored_best(options: TrainOptions) -> Loss:
    """Compute cross-entropy and KL over the stored best ids, in memory, for a student with the
    teacher's tokens."""
    with open_store(options.store) as store:
        stored = [record.views[0].logits for record in store]
    pieces = [torch.from_numpy(entry.ids.astype(np.int64)) for entry in stored]
    shares = [torch.from_numpy(entry.logprobs.astype(np.float32)) for entry in stored]

    def loss_of(student: Any, ids: Tensor, mask: Tensor, indices: list[int]) -> Tensor:
        cross_entropy, logits = _next(student, ids, mask)
        logprobs = functional.log_softmax(logits.float(), -1)
        kl, tokens = logprobs.new_zeros(()), 0
        for row, index in enumerate(indices):
            predicted = logprobs[row, : len(pieces[index])].gather(1, pieces[index])
            kl = kl + (shares[index].exp() * (shares[index] - predicted)).sum()
            tokens += len(pieces[index])
        return 0.5 * cross_entropy + 0.5 * kl / tokens

    return loss_of


def teacher_in_memory(model: str, options: TrainOptions) -> Loss:
    """Compute cross-entropy and KL over all logits of the teacher, which reads each batch."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    teacher: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def loss_of(student: Any, ids: Tensor, mask: Tensor, indices: list[int]) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher(input_ids=ids, attention_mask=mask).logits
            target = functional.log_softmax(teacher_logits.float(), -1)
        cross_entropy, logits = _next(student, ids, mask)
        logprobs = functional.log_softmax(logits.float(), -1)
        kl = functional.kl_div(logprobs, target, reduction="none", log_target=True).sum(-1)
        return 0.5 * cross_entropy + 0.5 * (kl * mask).sum() / mask.sum()

    return loss_of


def hours(dump: float, speeds: dict[str, float]) -> list[list[object]]:
    """Return the hours for ten students of 2M tokens, from measured tokens per second."""
    our_seconds, rows = STORED / dump + STUDENTS * TOKENS / speeds["ours"], list[list[object]]()
    for name, speed in speeds.items():
        dumped = 0.0 if name == "teacher in memory" else STORED / dump
        trained = STUDENTS * TOKENS / speed
        seconds = dumped + trained
        cells = [f"{s / 3600:.1f}" for s in (dumped, trained, seconds)]
        rows.append([name, *cells, f"{seconds / our_seconds:.1f}"])
    return rows


@click.command()
@click.option("--model", required=True, help="The teacher: a folder with a decoder.")
@click.option("--corpus", default=str(NOVELS))
@click.option("--tokens", default=20_000, help="Tokens of the store.")
@results_option
@click.option("--student", default="llama:128x4x2x320")
@click.option("--vocab", default="4k")
@click.option("--batch-tokens", default=2048, help="Teacher tokens.")
@click.option("--steps", default=12)
@click.option("--repeats", default=5)
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    student: str,
    vocab: str,
    batch_tokens: int,
    steps: int,
    repeats: int,
    results: Path,
) -> None:
    """Print the tables and put them into RESULTS.md."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.zarr"
        started = time.perf_counter()
        small_store(model, corpus, tokens, store, logits=f"topk:{TOP}", hidden="none")
        with open_store(store) as opened:
            dump = opened.meta["tokens"] / (time.perf_counter() - started)
        base = TrainOptions(
            store=str(store), view=0, held_out=0.0, student=student, vocab=vocab, init="random",
            loss=parse_losses(("next=1",)), batch_tokens=batch_tokens, steps=steps,
        ).resolved()  # fmt: skip
        same = replace(base, vocab="teacher")
        losses = dict(NEXT_LOSS)
        measured = interleaved(
            {
                f"{vocab}, text alone: plain": partial(plain, base, text_alone),
                f"{vocab}, text alone: ours": partial(from_store, base),
                f"{vocab}, default losses: ours": partial(from_store, replace(base, loss=losses)),
                "teacher's, default losses: ours": partial(from_store, replace(same, loss=losses)),
                "teacher's, stored best ids: plain": partial(plain, same, stored_best),
                "teacher's, teacher in memory: plain": partial(
                    plain, same, partial(teacher_in_memory, model)
                ),
            },
            repeats,
        )
    speeds = [figures["speed"] for figures in measured.values()]
    rows: list[list[object]] = [
        [name, f"{figures['speed']:,.0f}", f"{figures['speed'] / speeds[0]:.2f}",
         "" if name.endswith("plain") else f"{figures['waiting']:.1%}"]
        for name, figures in measured.items()
    ]  # fmt: skip
    ways = {
        "ours": speeds[2],
        "ours, teacher's vocabulary": speeds[3],
        "stored, teacher's vocabulary": speeds[4],
        "teacher in memory": speeds[5],
    }
    text = (
        f"`python -m benchmarks.speed.decoders`. Teacher: {Path(model).name}; student: {student}."
        f" Data: {tokens:,} stored tokens of English novels in windows of at most 128, top {TOP},"
        f" about {batch_tokens:,} teacher tokens per batch, {base.precision}. Medians of {repeats}"
        f" interleaved processes of {steps} steps. The default losses of ours are"
        f" `{loss_words(NEXT_LOSS)}`; plain scripts with a teacher use half cross-entropy and half"
        f" KL. The second table is computed from the first: {STUDENTS} students of {TOKENS:,}"
        f" tokens each, from a dump of {STORED:,} tokens at the {dump:,.0f} tokens/s of this run,"
        " loading included."
    )
    tables = f"{table(HEAD, rows)}\n\n{table(HOURS, hours(dump, ways))}"
    publish("A decoder student's step", text, tables, results)


if __name__ == "__main__":
    main()
