"""Speed of a dump, next to the bare forward pass and a straightforward script.

    python -m benchmarks.speed.dumping [--model DIR --corpus TEXT] [--precision bf16]

All read the same windows, and none is timed in the first part of them: there libraries warm up, and
a dump does what it does once (calibration, the teacher's files). The bare pass: the same batches,
nothing stored. The straightforward dump: a script that requests everything of transformers
(hidden states and attention maps of all layers, all logits), takes topk and logsumexp, and appends
to arrays with zarr-python, in batches of the corpus' order; vectors of texts it takes from
sentence-transformers.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import zarr

from benchmarks.common.interleaved import Figures, alone, interleaved, peak_memory
from benchmarks.common.results import of_text, publish, table
from teachonce.checkpoints.names import resolve_model
from teachonce.support.console import command_errors
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.parts import gathered
from teachonce.teacher_dump.teacher.loading import PRECISIONS, load_teacher
from teachonce.teacher_dump.windows.cutting import iter_windows
from teachonce.teacher_dump.windows.sequences import iter_truncated
from teachonce.teacher_dump.windows.window import Window, length_batches, padded

KEPT = 16
PLAIN_BATCH = 32  # sequences
BATCHES = (2048, 8192, 32_768)
FEATURES: dict[str, dict[str, Any]] = {
    "hidden states": {"head": "none", "attention": "none", "logits": "none"},
    "all features": {"head": "auto", "attention": "mean", "logits": f"topk:{KEPT}"},
    "vectors of texts": {
        "head": "embedding", "pooling": "mean", "hidden": "none", "attention": "none",
        "logits": "none",
    },
}  # fmt: skip
HEAD = (
    "features",
    "",
    "tokens/s",
    "times the bare forward pass",
    "times straightforward",
    "peak memory, MB",
)


def parts_of(options: DumpOptions) -> list[list[Window]]:
    """Return the windows of every part, as the dump cuts them."""
    return list(cut(options))


def cut(options: DumpOptions) -> Iterator[list[Window]]:
    """Yield the parts of the dump."""
    tokenizer = load_teacher(options.model, head="none").tokenizer
    corpus, length = Corpus.open(options.sources()), options.max_length or 128
    if options.head == "embedding":
        windows = iter_truncated(corpus, tokenizer, length)
    else:
        windows = iter_windows(corpus, tokenizer, length, options.stride)
    yield from gathered(windows, options.part_tokens, options.limit)


def cutting(options: DumpOptions) -> Figures:
    """Cut the text into windows, without a teacher."""
    parts, started = list[list[Window]](), 0.0
    for part in cut(options):
        started = started or time.perf_counter()
        parts.append(part)
    return speed_of(started, parts)


def speed_of(started: float, parts: list[list[Window]]) -> Figures:
    """Return the speed over all parts but the first, and the peak of memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    tokens = sum(len(window.ids) for part in parts[1:] for window in part)
    return {"speed": tokens / seconds, "memory": peak_memory()}


def network(options: DumpOptions, **settings: Any) -> Any:
    """Load the teacher with transformers, on its device."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    kinds: dict[str, Any] = {"auto": AutoModelForMaskedLM, "causal": AutoModelForCausalLM}
    kind = kinds.get(options.head, AutoModel)
    folder = resolve_model(options.model).path_or_id
    dtype = PRECISIONS[options.precision]
    model = kind.from_pretrained(folder, dtype=dtype, **settings).eval()
    return model.to(options.resolved().device)


@torch.inference_mode()
def bare(options: DumpOptions) -> Figures:
    """Run the forward pass over the batches of the dump."""
    parts, model = parts_of(options), network(options)
    started, size = 0.0, options.resolved().tokens_per_batch
    for number, part in enumerate(parts):
        started = time.perf_counter() if number == 1 else started
        run_batches(model, part, size)
    return speed_of(started, parts)


def run_batches(model: Any, windows: list[Window], size: int) -> Any:
    """Run windows through a teacher in batches of `size` tokens, padding included; return the
    output of the last batch."""
    output = None
    for batch in length_batches([len(window.ids) for window in windows], size):
        arrays = padded([windows[i].ids for i in batch], 0)
        ids, present = (torch.from_numpy(values).long().to(model.device) for values in arrays)
        output = model(ids, attention_mask=present)
    return output


def ours(options: DumpOptions) -> Figures:
    """Run the dump, timed from the end of its first part."""
    ends: list[float] = []

    def say(line: str) -> None:
        if line.startswith("part "):
            ends.append(time.perf_counter())

    parts = parts_of(options)
    # A part's line is printed only if no terminal shows a bar.
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        dump(replace(options, out=Path(folder) / "store.zarr"), say)
        return speed_of(ends[0], parts)  # before the folder is deleted


@torch.inference_mode()
def straightforward(options: DumpOptions) -> Figures:
    """Dump with transformers and zarr-python alone, as a script of an afternoon does."""
    from transformers import AutoTokenizer

    parts = parts_of(options)
    model = network(options, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(options.model).path_or_id)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Arrays(zarr.open_group(folder, mode="w"))
        started = 0.0
        for number, texts in batches_of_texts(parts):
            started = time.perf_counter() if number and not started else started
            inputs = tokenizer(
                texts,
                padding=True,
                truncation=True,
                max_length=options.max_length,
                return_tensors="pt",
            ).to(model.device)
            output = model(
                **inputs,
                output_hidden_states=True,
                output_attentions=options.attention != "none",
            )
            present = inputs["attention_mask"].bool()
            arrays.put("hidden", torch.stack(output.hidden_states[1:]).mean(0)[present])
            if options.attention != "none":
                maps = torch.stack(output.attentions).mean((0, 2))
                flat = [m[:n, :n].flatten() for m, n in zip(maps, present.sum(1), strict=True)]
                arrays.put("attention", torch.cat(flat))
            if options.logits != "none":
                best, ids = output.logits.topk(KEPT, dim=-1)
                partition = output.logits.float().logsumexp(-1)
                arrays.put("ids", ids.int()[present])
                arrays.put("logprobs", (best - partition[..., None])[present])
                arrays.put("log_partition", partition[present])
        return speed_of(started, parts)


def encoded(options: DumpOptions) -> Figures:
    """Save the vectors of sentence-transformers, which sorts the texts of a call by length."""
    from sentence_transformers import SentenceTransformer

    parts, path = parts_of(options), resolve_model(options.model).path_or_id
    settings = {"dtype": PRECISIONS[options.precision]}
    device = options.resolved().device
    model = SentenceTransformer(path, device=device, model_kwargs=settings)
    with tempfile.TemporaryDirectory() as folder:
        arrays = Arrays(zarr.open_group(folder, mode="w"))
        started = 0.0
        for number, part in enumerate(parts):
            started = time.perf_counter() if number == 1 else started
            texts = [window.text for window in part]
            vectors = model.encode(texts, batch_size=PLAIN_BATCH, convert_to_tensor=True)
            arrays.put("vectors", vectors)
        return speed_of(started, parts)


def batches_of_texts(parts: list[list[Window]]) -> Iterator[tuple[int, list[str]]]:
    """Yield batches of texts in the order of the corpus, each with the number of its part."""
    for number, part in enumerate(parts):
        for begin in range(0, len(part), PLAIN_BATCH):
            yield number, [window.text for window in part[begin : begin + PLAIN_BATCH]]


class Arrays:
    """Appends to arrays of zarr-python; floats become float16."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def put(self, name: str, values: torch.Tensor) -> None:
        array = (values.half() if values.is_floating_point() else values).cpu().numpy()
        if name not in self.group:
            shape = (0, *array.shape[1:])
            chunks = (16384, *array.shape[1:])
            self.group.create_array(name, shape=shape, chunks=chunks, dtype=array.dtype)
        self.group[name].append(np.ascontiguousarray(array))


def compared(options: DumpOptions) -> dict[str, Callable[[], Figures]]:
    """Return the settings that take turns."""
    return {
        "bare forward pass": partial(bare, options),
        "ours": partial(ours, options),
        "straightforward": partial(
            encoded if options.head == "embedding" else straightforward, options
        ),
    }


def measure(options: DumpOptions, kinds: Sequence[str], repeats: int) -> list[list[object]]:
    """Return a row for each setting."""
    rows: list[list[object]] = []
    for features in kinds:
        results = interleaved(compared(replace(options, **FEATURES[features])), repeats)
        speed = {name: figures["speed"] for name, figures in results.items()}
        for name, figures in results.items():
            bases = (speed[base] for base in ("bare forward pass", "straightforward"))
            ratios = [f"{speed[name] / base:.2f}" for base in bases]
            memory = f"{figures['memory']:,.0f}"
            rows.append([features, name, f"{speed[name]:,.0f}", *ratios, memory])
    return rows


def memories(options: DumpOptions) -> list[list[object]]:
    """Return a row for each batch size: the peak memory of a dump of all features."""
    full = replace(options, **FEATURES["all features"])
    return [
        [f"{size:,}", f"{alone(partial(ours, replace(full, batch_tokens=size)))['memory']:,.0f}"]
        for size in BATCHES
    ]


@click.command()
@of_text(48_000)
@click.option("--features", type=click.Choice([*FEATURES]), help="Of all, these alone.")
@click.option("--part-tokens", default=16_000)
@click.option("--batch-tokens", default=2048)
@click.option("--precision", default="fp32")
@click.option("--repeats", default=5)
@command_errors
def main(
    model: str,
    corpus: str,
    tokens: int,
    features: str | None,
    part_tokens: int,
    batch_tokens: int,
    precision: str,
    repeats: int,
    results: Path,
) -> None:
    """Print the table and write it to RESULTS.md."""
    options = DumpOptions(
        model=model,
        corpus=(corpus,),
        out=Path("store.zarr"),
        limit=tokens,
        part_tokens=part_tokens,
        batch_tokens=batch_tokens,
        precision=precision,
        max_length=128,
    )
    option = f' --features "{features}"' if features else ""
    cut_alone = interleaved({"": partial(cutting, options)}, repeats)[""]["speed"]
    tables = [table(HEAD, measure(options, [features] if features else [*FEATURES], repeats))]
    if not features:
        tables.append(table(("--batch-tokens", "all features, peak memory, MB"), memories(options)))
    publish(
        f"Dumping {features}, {precision}" if features else f"Dumping, {precision}",
        f"`python -m benchmarks.speed.dumping{option} --tokens {tokens} --part-tokens {part_tokens}"
        f" --batch-tokens {batch_tokens} --precision {precision} --repeats {repeats}`."
        " `ours` is a dump, `bare forward pass` runs the teacher on the same batches and stores"
        " nothing, and `straightforward` is a plain script in batches of"
        f" {PLAIN_BATCH} sequences that stores float16. Teacher: {Path(model).name}, windows of at"
        f" most 128 tokens, codec default. Medians of {repeats} interleaved processes. One process"
        f" cuts the text alone into windows at {cut_alone:,.0f} tokens/s.",
        "\n\n".join(tables),
        results,
    )


if __name__ == "__main__":
    main()
