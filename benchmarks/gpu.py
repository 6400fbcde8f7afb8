"""Speed on a GPU: a dump, its head, and a student's steps with every kind of cache.

    python -m benchmarks.gpu [--corpus TEXT]

The teacher is of BERT-base's size, with random weights and a vocabulary of 120,000; a second one is
a decoder of the size of Llama 3.2 1B. The student, by default `bert:tiny` (the `tiny` of
Kolesnikova et al.), is timed from its second epoch on, when the cache is filled, and next to a
teacher in memory.
Each table is printed as soon as it is measured. Fifteen minutes of an H100 were too few for a
process for each run, so that all runs share one.
The peak is the manufacturer's figure for dense bfloat16 products.
A source at its published size is run by `python -m benchmarks.reproduce SOURCE --size full`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import on_small_store, random_decoder, random_teacher
from benchmarks.speed import dumping, stepping
from benchmarks.speed.online_teacher import OnlineTeacher
from teachonce.store import open_store
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.option_values import CACHES
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.student_training import train
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher import heads
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.training.device import resolved_device

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}  # a second
FEATURES: dict[str, dict[str, Any]] = {
    "states": {"head": "none", "attention": "none", "logits": "none"},
    "states and logits": {"head": "auto", "attention": "none", "logits": "topk:16"},
}
OF_DECODER: dict[str, dict[str, Any]] = {
    "a decoder's logits": {
        "head": "causal", "hidden": "none", "attention": "none", "logits": "topk:16",
    },
}  # fmt: skip
KEPT = (16, 64)
HEAD_OF_DUMPS = (
    "features",
    "",
    "tokens/s",
    "times the bare forward pass",
    "times straightforward",
    "share of peak",
)
HEAD_OF_HEADS = ("logits", "", "tokens/s", "times plain", "share of peak")
HEAD_OF_STUDENTS = ("", "student tokens/s", "times the first row", "time waiting for data")


def of_peak(rate: float, device: str) -> str:
    """Return a rate, in operations per second, as a share of the device's peak; '' if the peak is
    unknown."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    peak = next((peak for key, peak in PEAKS.items() if key in name), None)
    return f"{rate / peak:.1%}" if peak else ""


def operations(options: DumpOptions) -> float:
    """Count the multiplications and additions of the weights for a token. Attention between tokens,
    a few hundredths at these lengths, is excluded."""
    model = dumping.network(replace(options, device="cpu"))
    weights = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if "embed" not in name and "pooler" not in name  # applied to one token of a text
    )
    config = model.config
    decoder = 0 if options.head == "none" else config.vocab_size * config.hidden_size
    return float(2 * (weights + decoder))


def dumps(
    options: DumpOptions, repeats: int, kinds: dict[str, dict[str, Any]] = FEATURES
) -> list[list[object]]:
    """Return a row for each setting of the dump."""
    rows: list[list[object]] = []
    for features, changes in kinds.items():
        changed = replace(options, **changes)
        results = interleaved(dumping.compared(changed), repeats, separate=False)
        speed = {name: figures["speed"] for name, figures in results.items()}
        of_token = operations(changed)
        for name, tokens in speed.items():
            ratios = (tokens / speed[base] for base in ("bare forward pass", "straightforward"))
            peak = of_peak(tokens * of_token, options.device)
            rows.append([features, name, f"{tokens:,.0f}", *(f"{r:.2f}" for r in ratios), peak])
    return rows


@torch.inference_mode()
def head(
    model: str, device: str, precision: str, function: str, k: int, rows: int, runs: int
) -> Figures:
    """Measure tokens per second through the head alone; `function` names one of `heads`."""
    decoder = load_teacher(model, attention="none", device=device, precision=precision).decoder
    assert decoder is not None
    dtype = torch.bfloat16 if decoder.rounded else torch.float32
    values = torch.randn(rows, decoder.weight.shape[1], device=device, dtype=dtype)
    times = []
    for _ in range(runs + 1):  # the first compiles
        started = time.perf_counter()
        for _, _, tail in getattr(heads, function)(decoder, values, k):
            tail.sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
    return {"speed": rows / statistics.median(times[1:])}


def head_rows(options: DumpOptions, repeats: int, rows: int, runs: int) -> list[list[object]]:
    """Return a row for each setting of the head; for the fused kernel only if it is available."""
    lines: list[list[object]] = []
    device = torch.device(options.device)
    decoder = load_teacher(options.model, attention="none").decoder
    assert decoder is not None
    for k in KEPT:
        functions = {"plain": "chunked_logits"}
        if device.type == "cuda" and heads.has_fused_kernel(k, device):
            functions["one kernel"] = "fused_logits"
        settings = {
            name: partial(
                head, options.model, options.device, options.precision, function, k, rows, runs
            )
            for name, function in functions.items()
        }
        speed = {
            name: f["speed"] for name, f in interleaved(settings, repeats, separate=False).items()
        }
        for name, tokens in speed.items():
            peak = of_peak(tokens * 2.0 * decoder.weight.numel(), options.device)
            ratio = f"{tokens / speed['plain']:.2f}"
            lines.append([f"topk:{k}", name, f"{tokens:,.0f}", ratio, peak])
    return lines


def online(options: TrainOptions, model: str) -> Figures:
    """Train with the teacher in memory; return the student tokens per second."""
    store = open_store(options.store)
    student, collator, _ = prepare(options, store)
    precision = str(store.identity["arguments"]["precision"])
    teacher = load_teacher(model, attention="none", device=options.device, precision=precision)
    source: Any = OnlineTeacher(store, teacher)
    times, tokens = [time.perf_counter()], list[float]()

    def watch(_: int, metrics: dict[str, float]) -> None:
        times.append(time.perf_counter())
        tokens.append(metrics["tokens"])

    train(source, student, collator, options, on_step=watch)
    seconds = [after - before for before, after in zip(times[2:], times[3:], strict=False)]
    speeds = (count / elapsed for count, elapsed in zip(tokens[2:], seconds, strict=True))
    return {"speed": statistics.median(speeds)}


def students(base: TrainOptions, model: str, repeats: int) -> list[list[object]]:
    """Return a row for each setting: `base.steps` steps are timed, after an epoch."""
    steps = base.steps or 0
    store = open_store(base.store)
    epoch = store.batch_count(base.seed, 0, base.batch_tokens)
    longer = replace(base, steps=epoch + steps)
    settings: dict[str, Any] = {
        f"--cache {cache}": partial(stepping.ours, replace(longer, cache=cache), epoch)
        for cache in CACHES
    }
    settings["teacher in memory"] = partial(online, base, model)
    results = interleaved(settings, repeats, separate=False)
    baseline = next(iter(results.values()))["speed"]
    return [
        [
            name,
            f"{figures['speed']:,.0f}",
            f"{figures['speed'] / baseline:.2f}",
            f"{figures['waiting']:.1%}" if "waiting" in figures else "",
        ]
        for name, figures in results.items()
    ]


@click.command()
@of_text(400_000)
@click.option("--vocabulary", default=120_000, help="Of the teacher.")
@click.option("--layers", default=12, help="Of the teacher.")
@click.option("--decoder-width", default=2048, help="Of the second teacher; heads of 64.")
@click.option("--decoder-layers", default=16)
@click.option("--part-tokens", default=100_000)
@click.option("--dump-batch", default=32_768, help="Tokens of the teacher's batches.")
@click.option("--student", default="bert:tiny")
@click.option("--vocab", default="5k")
@click.option("--batch-tokens", default=16_384, help="Of the student's batches.")
@click.option("--steps", default=100)
@click.option("--device", default="cuda", help="cpu: tries the script, and publishes nothing.")
@click.option("--precision", default="bf16")
@click.option("--repeats", default=3)
@command_errors
def main(
    model: str, corpus: str, tokens: int, vocabulary: int, layers: int, decoder_width: int,
    decoder_layers: int, part_tokens: int, dump_batch: int, student: str, vocab: str,
    batch_tokens: int, steps: int, device: str, precision: str, repeats: int, results: Path,
) -> None:  # fmt: skip
    """Print the tables and write them to RESULTS.md. `--model` is used for its tokenizer only."""
    device = resolved_device(device)
    with tempfile.TemporaryDirectory() as folder:
        teacher = random_teacher(
            Path(folder) / "encoder", model, vocab_size=vocabulary, num_hidden_layers=layers
        )
        decoder = random_decoder(
            Path(folder) / "decoder", corpus, vocab_size=vocabulary, hidden_size=decoder_width,
            intermediate_size=4 * decoder_width, num_hidden_layers=decoder_layers,
            num_attention_heads=decoder_width // 64, num_key_value_heads=decoder_width // 256 or 1,
        )  # fmt: skip
        options = DumpOptions(
            model=teacher, corpus=(corpus,), out=Path("store.zarr"), limit=tokens,
            part_tokens=part_tokens, batch_tokens=dump_batch, device=device, precision=precision,
            max_length=128,
        )  # fmt: skip
        tables = list[str]()

        def add(head: Sequence[str], rows: list[list[object]]) -> None:
            tables.append(table(head, rows))
            print(tables[-1], flush=True)  # a lent machine may be taken back before the end

        add(HEAD_OF_DUMPS, dumps(options, repeats))
        add(HEAD_OF_DUMPS, dumps(replace(options, model=decoder), repeats, OF_DECODER))
        add(HEAD_OF_HEADS, head_rows(options, repeats, dump_batch, runs=5))
        settings: dict[str, Any] = {
            "student": student,
            "vocab": vocab,
            "batch_tokens": batch_tokens,
        }
        with on_small_store(teacher, corpus, tokens, steps=steps, device=device, **settings) as cfg:
            add(HEAD_OF_STUDENTS, students(cfg.resolved(), teacher, repeats))
    if device == "cpu":
        return
    publish(
        f"On a GPU: {torch.cuda.get_device_name(device)}",
        f"`python -m benchmarks.gpu --tokens {tokens}`. Teachers: an encoder of {layers} layers"
        f" with hidden size 768 and a decoder of {decoder_layers} layers with hidden size"
        f" {decoder_width}, both with random weights, a vocabulary of {vocabulary:,}, {precision},"
        f" windows of at most 128 tokens and batches of {dump_batch:,}. Student: {student} with"
        f" {vocab} WordPiece, batches of {batch_tokens:,}, {steps} steps after an epoch. Medians of"
        f" {repeats} interleaved runs in one process.",
        "\n\n".join(tables),
        results,
    )


if __name__ == "__main__":
    main()
