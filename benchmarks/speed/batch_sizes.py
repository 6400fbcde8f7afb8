"""Speed of a teacher's forward pass by the size of its batches.

    python -m benchmarks.speed.batch_sizes [--model DIR --corpus TEXT]

All sizes read the same windows and take turns in one process; the time is that of its CPU if there
is no GPU, so that other jobs count little.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from benchmarks.speed.dumping import FEATURES, network, parts_of, run_batches
from teachonce.support.console import command_errors
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.windows.window import Window

SIZES = (512, 1024, 2048, 4096, 8192)
PRECISIONS = ("fp32", "bf16")


@torch.inference_mode()
def passed(model: Any, windows: list[Window], size: int) -> Figures:
    """Measure the forward pass over windows in batches of `size` tokens."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    started = clock()
    run_batches(model, windows, size).last_hidden_state.sum().item()  # waits for the device
    return {"speed": sum(len(window.ids) for window in windows) / (clock() - started)}


@click.command()
@of_text(16_000)
@click.option("--repeats", default=5)
@command_errors
def main(model: str, corpus: str, tokens: int, repeats: int, results: Path) -> None:
    """Print the table and write it to RESULTS.md."""
    rows = list[list[object]]()
    for precision in PRECISIONS:
        options = DumpOptions(
            *(model, Path("none.zarr"), (corpus,)), limit=tokens, part_tokens=tokens,
            max_length=128, precision=precision, **FEATURES["hidden states"],
        )  # fmt: skip
        (windows,), teacher = parts_of(options), network(options)
        passed(teacher, windows, max(SIZES))  # libraries warm up
        sizes = {f"{size:,}": partial(passed, teacher, windows, size) for size in SIZES}
        speeds = interleaved(sizes, repeats, separate=False)
        largest = speeds[f"{max(SIZES):,}"]["speed"]
        rows += (
            [precision, size, f"{found['speed']:,.0f}", f"{found['speed'] / largest:.2f}"]
            for size, found in speeds.items()
        )
    publish(
        "Batches of a teacher",
        f"`python -m benchmarks.speed.batch_sizes --tokens {tokens} --repeats {repeats}`. The"
        f" forward pass of {Path(model).name} over windows of at most 128 tokens, in"
        f" {torch.get_num_threads()} threads: tokens per second of CPU time (of a GPU: of time)."
        f" Medians of {repeats} interleaved runs.",
        table(("precision", "--batch-tokens", "tokens/s", "times 8,192"), rows),
        results,
    )


if __name__ == "__main__":
    main()
