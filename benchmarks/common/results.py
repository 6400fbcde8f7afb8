"""Sections of RESULTS.md: tables of figures with hardware, versions and settings."""

from __future__ import annotations

import functools
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
# Real texts and a real teacher, if the machine has them.
SHARED = Path(os.environ.get("TEACHONCE_DATA") or Path(__file__).parents[3] / "shared")
TEACHER, NOVELS = SHARED / "models/minilm-mlm", SHARED / "data/text/en_novels.txt"


results_option = click.option(
    "--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True
)


def of_text(tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the options of a benchmark that dumps some text itself: --model, --corpus, --tokens,
    --results."""
    options = (
        click.option("--model", default=str(TEACHER) if TEACHER.exists() else "minilm"),
        click.option("--corpus", default=str(NOVELS) if NOVELS.exists() else "python-docs"),
        click.option("--tokens", default=tokens),
        results_option,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        return functools.reduce(lambda cmd, option: option(cmd), reversed(options), command)

    return decorate


def hardware() -> str:
    """Return processor, cores, memory and the relevant versions, in one line."""
    import torch

    from teachonce.downstream.speed import processor

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "transformers", "tokenizers", "zarr", "h5py")
    )
    return (
        f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GB{device}; Python"
        f" {platform.python_version()}, {versions}"
    )


def whole_size(store: Path) -> int:
    """Return the bytes on disk of a store, including the teacher's files."""
    from teachonce.store.tools.info import bytes_on_disk

    sizes = bytes_on_disk(str(store))
    assert sizes is not None  # of an address
    return sizes["total"]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a markdown table; floats have four significant digits."""
    printed = [
        [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [list(head), ["---"] * len(head), *printed]
    )


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return `mean ± sample deviation` over seeds; for a single seed the value alone."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def publish(title: str, settings: str, body: str, results: Path = RESULTS) -> str:
    """Print a section and write it to RESULTS.md in place of the section with the same title, which
    may be part of another section."""
    section = f" {title}\n\n{settings}\nOn: {hardware()}\n\n{body}\n"
    print(f"##{section}")
    old = (
        results.read_text()
        if results.exists()
        else "# Results\n\nEach section is written by the script it names.\n"
    )
    parts = re.split(r"(?m)^(?=###? )", old)
    titles = [part.lstrip("#").partition("\n")[0] for part in parts]
    if f" {title}" in titles:
        number = titles.index(f" {title}")
        parts[number] = parts[number].partition(" ")[0] + section
    else:
        parts.append(f"##{section}")
    results.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    return f"##{section}"
