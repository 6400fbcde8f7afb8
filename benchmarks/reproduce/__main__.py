"""The claims of five papers in miniature: which orderings of their arms hold on real data.

    python -m benchmarks.reproduce SOURCE --work DIR [--seeds N] [--size small|full] [--jobs N]
    python -m benchmarks.reproduce best|all --work DIR

Every step is a command as a user types it; --jobs students at a time are trained and scored, and
share the cores. What is finished in --work is not made again; no arm is chosen by the test set, it
only scores. `best` compares our recipe with the best of each source; it finds finished work in
DIR/SOURCE. `all` is every task of every paper once in DIR/SOURCE, and then `best`. A section that
is written again loses what was written below it by hand.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.common.results import RESULTS, publish
from benchmarks.reproduce.arms import SIZES, Reproduction
from benchmarks.reproduce.orderings import compare_best, ordering_table
from benchmarks.reproduce.papers import ALL, BEST, SOURCES
from support.console import command_errors


@click.command()
@click.argument("name", metavar="SOURCE")
@click.option("--work", type=click.Path(path_type=Path), required=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3)
@click.option("--size", type=click.Choice(SIZES), default="small")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="students at a time")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(name: str, work: Path, seeds: int, size: str, jobs: int, results: Path) -> None:
    """Train and score the arms of a SOURCE: kolesnikova, mukherjee (also mukherjee-snips
    and mukherjee-500), tinymbert, zhao, slovakbert; best: our recipe against that of each; all:
    these but mukherjee-500, and best."""
    if name not in (*SOURCES, "best", "all"):
        raise click.BadParameter(f"there are {', '.join(SOURCES)}, best, all", param_hint="SOURCE")
    folders = {each: work / each for each in ALL if name == "all"}
    if name in SOURCES:
        folders = {name: work}
    how = f"--seeds {seeds} --size {size}"
    for each, folder in folders.items():
        source = SOURCES[each]
        arms = Reproduction(source, folder, seeds, size, jobs)
        body = ordering_table(source, arms.scores())
        took = f"All of it took {arms.minutes():.0f} minutes with --jobs {jobs}."
        said = f"`python -m benchmarks.reproduce {each} {how}`; {source.settings[size]} {took}"
        publish(source.title, said, body, results)
    if name not in SOURCES:
        body = compare_best(ALL, work, seeds, size, jobs)
        said = f"`python -m benchmarks.reproduce best {how}`; {BEST}"
        publish("Our recipe against those of the sources", said, body, results)


if __name__ == "__main__":
    main()
