"""A store that grows by a tenth of its corpus, against a whole dump; and documents forgotten.

    python -m benchmarks.speed.growing [--model DIR --corpus TEXT --tokens N]

Each in a process of its own, in which a dump of a few tokens has loaded the libraries before the
clock runs. CPU seconds tell what is needed where other work runs on the machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from teachonce.store import open_store
from teachonce.store.tools.forget import Wanted, forget
from teachonce.support.console import command_errors
from teachonce.teacher_dump.corpus.documents import Corpus
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions

SHARE = 10  # one document in so many is new, or forgotten
CHARACTERS = 4  # a token, about
PARTS = 16  # of the old store
HEAD = ("", "tokens that the teacher reads", "seconds", "CPU seconds", "CPU, of the whole dump")


def texts(corpus: str, tokens: int, folder: Path) -> tuple[Path, Path]:
    """Write a corpus of about so many tokens, and what it was before its last documents came."""
    found: list[str] = []
    left = tokens * CHARACTERS
    for document in Corpus.open([corpus]):
        found.append(" ".join(document.text.split()))
        left -= len(found[-1])
        if left <= 0:
            break
    before, now = folder / "before.txt", folder / "now.txt"
    for path, lines in ((before, found[: -(-len(found) * (SHARE - 1) // SHARE)]), (now, found)):
        path.write_text("\n".join(lines) + "\n", "utf-8")
    return before, now


def timed(work: Callable[[], int]) -> Figures:
    """Measure what reads so many tokens."""
    begun, used = time.perf_counter(), os.times()
    tokens = work()
    ended = os.times()
    cpu = sum(ended[:2]) - sum(used[:2])
    return {"tokens": tokens, "seconds": time.perf_counter() - begun, "cpu": cpu}


def dumped(out: Path, tokens: int, **options: Any) -> Figures:
    """Make a store anew; `tokens` of it are not read."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        few = {**options, "grow_from": None, "limit": 64, "out": Path(folder) / "few.zarr"}
        dump(DumpOptions(**few))
    return timed(lambda: dump(DumpOptions(out=out, **options)).tokens - tokens)


def forgotten(store: Path) -> Figures:
    """Forget one document of ten, of all parts, in a copy of a store."""
    copy = store.with_name("copy.zarr")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    with open_store(copy) as opened:
        documents = sorted({record.document for record in opened})
    numbers = {number: "" for number in documents[::SHARE]}
    return timed(lambda: forget(copy, "", lambda _: Wanted(numbers)).documents * 0)


def rows_of(model: str, before: Path, now: Path, folder: Path, repeats: int) -> list[list[object]]:
    """Measure all, in turn."""
    size = {"part_tokens": max(64, before.stat().st_size // CHARACTERS // PARTS), "max_length": 128}
    options: dict[str, Any] = {"model": model, **size}
    olds = {ext: folder / f"old.{ext}" for ext in ("zarr", "h5")}
    for path in olds.values():
        dump(DumpOptions(out=path, corpus=(str(before),), **options))
    with open_store(olds["zarr"]) as old:
        known = int(old.meta["tokens"])
    whole = {**options, "corpus": (str(now),)}
    works: dict[str, Callable[[], Figures]] = {
        "the whole corpus, Zarr": partial(dumped, folder / "whole.zarr", 0, **whole)
    }
    for name, ext in (("Zarr, by links", "zarr"), ("HDF5, copied", "h5")):
        grown = partial(dumped, folder / f"grown.{ext}", known, grow_from=olds[ext], **whole)
        works[f"what is new, {name}"] = grown
    same = {**whole, "corpus": (str(before),), "grow_from": olds["zarr"]}
    works["nothing new, Zarr, by links"] = partial(dumped, folder / "same.zarr", known, **same)
    works["one document of ten forgotten, in every part"] = partial(forgotten, olds["zarr"])
    found = interleaved(works, repeats)
    first = found["the whole corpus, Zarr"]["cpu"]
    return [
        [name, f"{row['tokens']:,.0f}", row["seconds"], row["cpu"], f"{row['cpu'] / first:.3f}"]
        for name, row in found.items()
    ]


@click.command()
@of_text(tokens=20_000)
@click.option("--repeats", default=1)
@command_errors
def main(model: str, corpus: str, tokens: int, results: Path, repeats: int) -> None:
    """A store that grows by a tenth, against a whole dump; documents forgotten."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        before, now = texts(corpus, tokens, folder)
        rows = rows_of(model, before, now, folder, repeats)
    publish(
        "A corpus that grew",
        f"`python -m benchmarks.speed.growing --tokens {tokens}`; {Path(model).name} over"
        f" {Path(corpus).name}, default features, windows of up to 128 tokens, {PARTS} old parts;"
        f" one document in {SHARE} is new; medians of {repeats}. Loading libraries is left out,"
        " loading the teacher is not.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
