"""Time and memory against the size of the corpus, and of stores of many parts.

    python -m benchmarks.speed.growth [--most N]

A tiny random teacher, so that what is measured is everything but the teacher. Each size in a
process of its own; memory is the most that it held.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import synthetic
from benchmarks.common.interleaved import Figures, alone, interleaved, peak_memory
from benchmarks.common.results import RESULTS, TEACHER, publish, table
from benchmarks.common.small_store import random_teacher
from teachonce.store import open_store
from teachonce.store.tools.copy import begin_copy, copy_part
from teachonce.support.console import command_errors

STEPS = 30
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
HEAD = (
    "tokens",
    *("dump, s", "tokens/s", "MB"),
    *("open, ms", "stream an epoch, s", "tokens/s", "MB"),
    *(f"{STEPS} steps, s", "to the first step, s", "MB"),
)


def corpus_of(path: Path, tokens: int) -> str:
    """Lines of words, about as many tokens."""
    rng = np.random.default_rng(0)
    words = np.array([a + b for a in synthetic.WORDS for b in synthetic.WORDS])
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < tokens:
            count = int(rng.integers(6, 60))
            file.write(" ".join(rng.choice(words, count)) + "\n")
            written += count + 2
    return str(path)


def dumped(model: str, corpus: str, tokens: int, out: Path) -> Figures:
    """A whole dump."""
    from teachonce.teacher_dump.job.dump import dump
    from teachonce.teacher_dump.job.options import DumpOptions

    begun = time.perf_counter()
    dump(DumpOptions(model, out, (corpus,), limit=tokens, attention="none", max_length=128))
    return {"seconds": time.perf_counter() - begun, "memory": peak_memory()}


def streamed(path: Path) -> Figures:
    """Open a store, and read all of it in shuffled batches."""
    begun = time.perf_counter()
    store = open_store(path)
    opened = time.perf_counter()
    for _ in store.stream(0, 0, 16_384):
        pass
    return {
        "open": 1000 * (opened - begun),
        "seconds": time.perf_counter() - opened,
        "memory": peak_memory(),
    }


def trained(path: Path) -> Figures:
    """Some steps of a student; the libraries are loaded, its vocabulary and tokens not."""
    from teachonce.student_train.output.run import prepare
    from teachonce.student_train.settings.loss_weights import parse_losses
    from teachonce.student_train.settings.options import TrainOptions
    from teachonce.student_train.train.student_training import train

    begun = time.perf_counter()
    store = open_store(path)
    options = TrainOptions(
        *(str(path),), student="32x1x2", vocab="200", loss=parse_losses(("mlm=1,hidden=1",)),
        init="random", steps=STEPS, held_out=0.0,
    ).resolved()  # fmt: skip
    student, collator, _ = prepare(options, store)
    times: list[float] = []
    train(store, student, collator, options, on_step=lambda *_: times.append(time.perf_counter()))
    return {
        "first": times[0] - begun,
        "seconds": times[-1] - times[0],
        "memory": peak_memory(),
    }


def many_parts(path: Path, parts: int) -> None:
    """A store of a few sequences, again and again: a writer takes a tenth of a second for a part,
    most of it until it is on the disk."""
    one = path.with_name("one-part.zarr")
    synthetic.make_store(one, 40, synthetic.features_of(8, 2))
    store = open_store(one)
    begun = partial(begin_copy, path, store, store.features, store.identity, range(parts))
    with closing(begun()) as writer:
        copy_part(writer, 0, store, 0, store, 0)
    first = path / "parts/0"
    group = json.loads((first / "zarr.json").read_text())
    for number in range(1, parts):
        shutil.copytree(first, path / f"parts/{number}")
        group["attributes"]["part"]["part"] = number
        (path / f"parts/{number}/zarr.json").write_text(json.dumps(group))
    with closing(begun()) as writer:
        writer.seal()
    store.close()
    shutil.rmtree(one)


def opened(path: Path) -> Figures:
    """Until a store is open, and until its first batch is there."""
    begun = time.perf_counter()
    store = open_store(path)
    middle = time.perf_counter()
    next(iter(store.stream(0, 0, 1024)))
    return {
        "open": 1000 * (middle - begun),
        "first": 1000 * (time.perf_counter() - begun),
        "memory": peak_memory(),
    }


def sizes(model: str, folder: Path, most: int) -> list[list[object]]:
    """A row for each size of the corpus, in powers of ten."""
    rows: list[list[object]] = []
    for tokens in itertools.takewhile(lambda n: n <= most, (10**k for k in range(4, 9))):
        corpus, out = corpus_of(folder / "text.txt", tokens), folder / f"{tokens}.zarr"
        dump = alone(partial(dumped, model, corpus, tokens, out))
        read = interleaved({"read": partial(streamed, out)}, 3)["read"]
        learnt = alone(partial(trained, out))
        rows.append(
            [
                f"{tokens:,}",
                *(f"{dump['seconds']:.1f}", f"{tokens / dump['seconds']:,.0f}"),
                f"{dump['memory']:,.0f}",
                *(f"{read['open']:.1f}", f"{read['seconds']:.2f}"),
                *(f"{tokens / read['seconds']:,.0f}", f"{read['memory']:,.0f}"),
                *(f"{learnt['seconds']:.2f}", f"{learnt['first']:.2f}"),
                f"{learnt['memory']:,.0f}",
            ]
        )
    return rows


def starts(folder: Path, most: int) -> list[list[object]]:
    """A row for each number of parts."""
    rows: list[list[object]] = []
    for parts in itertools.takewhile(lambda n: n <= most, (100, 1000, 10_000)):
        path = folder / f"{parts}-parts.zarr"
        many_parts(path, parts)
        found: dict[str, Any] = interleaved({"open": partial(opened, path)}, 5)["open"]
        count = len(open_store(path).manifest.parts)
        rows.append([f"{count:,}", *(f"{found[key]:,.0f}" for key in ("open", "first", "memory"))])
    return rows


@click.command()
@click.option("--most", default=10_000_000, help="Tokens of the largest corpus.")
@click.option("--parts", default=10_000)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(most: int, parts: int, results: Path) -> None:
    """Print the tables and put them into RESULTS.md."""
    told = (
        "`python -m benchmarks.speed.growth`; MB: the most that the process held,"
        " libraries included. "
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        publish(
            "Growth with parts",
            f"{told}Synthetic stores of equal parts of a few sequences.",
            table(("parts", "open, ms", "to the first batch, ms", "MB"), starts(folder, parts)),
            results,
        )
        model = random_teacher(
            folder / "teacher", str(TEACHER) if TEACHER.exists() else "minilm", **TINY
        )
        publish(
            "Growth with the corpus",
            f"{told}A random teacher of one layer, 32 wide, hidden states only; synthetic text; a"
            " student 32x1x2 with 200 WordPiece. Until the first step a student's vocabulary is"
            " trained and the store is tokenised for it, once.",
            table(HEAD, sizes(model, folder, most)),
            results,
        )


if __name__ == "__main__":
    main()
