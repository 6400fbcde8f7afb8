"""Speed of reading features, warm and from the disk, compared with other formats and readers.

    python -m benchmarks.reading [--tokens N] [--width D] [--kept K] [--rounds R]

A synthetic store; every reader delivers all of view 0, as stored (codes, not floats), in shuffled
flat batches of 16,384 tokens with padding. Each reader's first epoch is compared with ours, sum by
sum; then come rounds in which all take turns, each in a process of its own, after an epoch that is
not timed. Run it on a quiet machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from benchmarks.common.results import results_option
from benchmarks.reading.rounds import measure
from teachonce.support.console import command_errors


@click.command()
@click.option("--tokens", default=500_000)
@click.option("--width", default=384)
@click.option("--kept", default=16)
@click.option("--rounds", default=7)
@results_option
@command_errors
def main(tokens: int, width: int, kept: int, rounds: int, results: Path) -> None:
    """Print the tables and put them into RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), tokens, width, kept, rounds, results)


if __name__ == "__main__":
    main()
