"""Time and memory to open stores of up to a million parts, and to their first batch.

    python -m benchmarks.speed.many_parts [--most N]

What is opened is real: manifest, index, entries and lengths of every part. The parts are one part
of a few sequences: a link to it stands for each of the others, as a million folders of about 60
files would take hours to make and measure the file system. Each figure is of a process of its own.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.common.interleaved import Figures, alone, interleaved, peak_memory
from benchmarks.common.results import publish, results_option, table
from harness import synthetic
from teachonce.store import open_store
from teachonce.store.containers.paths import staging_of
from teachonce.store.format.index import FEW_PARTS
from teachonce.store.format.manifest import Part, length_dtype
from teachonce.store.tools.copy import begin_copy, copy_part
from teachonce.store.write.tree import root_of_parts
from teachonce.support.arrays import Array
from teachonce.support.console import command_errors

WORKS = ("open", "first batch", "epoch plan", "content hash")
HEAD = ("parts", "version", *(f"{work}, {unit}" for work in WORKS for unit in ("s", "CPU s", "MB")))
SETTINGS = (
    "`python -m benchmarks.speed.many_parts`. MB is the peak memory of the process, libraries"
    " included (about 80 MB when they are loaded). The arrays exist for one part only, and every"
    " other part is a link to it: the benchmark measures the store's bookkeeping, not a million"
    " folders and not the reading of features. Version 1 with 10,000 parts is the format that was"
    " written before there was an index. The first batch, the epoch plan and the content hash"
    " include the opening. The files were in memory."
)


def many_parts(path: Path, parts: int, few: int = FEW_PARTS) -> Figures:
    """Make a store with `parts` parts, all of them links to the first. Above `few` parts, the store
    has an index."""
    template = path.with_name("one-part.zarr")
    if not template.exists():
        synthetic.make_store(template, 200, synthetic.features_of(8, 2))
    with closing(open_store(template)) as source:
        copied = begin_copy(path, source, source.features, source.identity, range(parts))
        with closing(copied) as writer:
            copy_part(writer, 0, source, 0, source, 0)
            published = writer.published_part(0)
    for number in range(1, parts):
        (path / f"parts/{number}").symlink_to("0")
    staging = staging_of(path)
    with closing(staging.source()) as started:
        attributes = started.attributes()
    pairs = _repeated(published, source, parts)
    with mock.patch("teachonce.store.write.tree.FEW_PARTS", few):
        staging.seal(partial(root_of_parts, attributes, source.features, pairs, parts))
    return {}


def _repeated(part: Part, source: Any, parts: int) -> Iterator[tuple[Part, Array]]:
    lengths = source.all_lengths().astype(length_dtype(source.features))
    for number in range(parts):
        yield replace(part, number=number), lengths


def timed(path: Path, work: Callable[[Any], object]) -> Figures:
    """Open a store and use it."""
    started, cpu_started = time.perf_counter(), time.process_time()
    opened = open_store(path)
    work(opened)
    return {
        "parts": opened.meta["parts"],
        "version": opened.meta["version"],
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu_started,
        "memory": peak_memory(),
    }


def nothing(fs: Any) -> None:
    """Open the store and nothing else."""


def first_batch(fs: Any) -> None:
    """Read a batch of an epoch in random order."""
    next(iter(fs.stream(0, 0, 16_384)))


def planned(fs: Any) -> None:
    """Plan all batches of an epoch."""
    fs.batch_count(0, 0, 16_384)


def content(fs: Any) -> None:
    """Compute the SHA-256 over the checksums of all arrays."""
    fs.manifest.content()


def row(path: Path, repeats: int = 3) -> list[object]:
    """Return the figures of a store."""
    quick = {work: partial(timed, path, work) for work in (nothing, first_batch)}
    results = interleaved({work.__name__: run for work, run in quick.items()}, repeats)
    results |= {work.__name__: alone(partial(timed, path, work)) for work in (planned, content)}
    opening = results[nothing.__name__]  # the peak memory of a process includes its parent's
    cells: list[object] = [f"{opening['parts']:,.0f}", f"{opening['version']:.0f}"]
    for figures in results.values():
        cells += [f"{figures['seconds']:.3f}", f"{figures['cpu']:.3f}"]
        cells.append(f"{figures['memory']:,.0f}")
    return cells


@click.command()
@click.option("--most", default=1_000_000, help="Parts of the largest store.")
@results_option
@command_errors
def main(most: int, results: Path) -> None:
    """Print the table and write it to RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        rows, sizes = [], itertools.takewhile(lambda n: n <= most, (100, 10_000, 1_000_000))
        for parts, *few in [(min(most, 10_000), 10_000), *((size,) for size in sizes)]:
            path = Path(name) / f"{parts}-{len(few)}.zarr"
            alone(partial(many_parts, path, parts, *few))
            rows.append(row(path))
        publish("A million parts", SETTINGS, table(HEAD, rows), results)


if __name__ == "__main__":
    main()
