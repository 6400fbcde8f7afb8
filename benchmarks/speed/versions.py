"""What two versions of this code take, in turn: an epoch of reading, and the start of each command.

    python -m benchmarks.speed.versions --before DIR      (a checkout of the other version)

Both read the very same stores. Each figure is the median of processes that take turns, and each
process reads its store once before it is timed.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.common.results import RESULTS, publish, table
from benchmarks.common.synthetic import features_of, make_store
from teachonce.store.tools.copy import convert

HERE = Path(__file__).parents[2]
COMMANDS = (
    "teacher_dump.cli",
    "student_train.cli",
    "student_train.sweep",
    "downstream.cli",
    "feature_store.cli",
)
READ = """
import sys, time
from {}store import open_store
fs = open_store(sys.argv[1])
best = 0.0
for epoch in range(int(sys.argv[2]) + 1):
    begin, tokens = time.process_time(), 0
    for batch in fs.stream(seed=0, epoch=epoch, batch_tokens=16384):
        tokens += len(batch.token_ids)
        batch.hidden["mean"].normalised(), batch.logits.logprobs, batch.attention["mean"]
    if epoch:
        best = max(best, tokens / (time.process_time() - begin))
print(best)
"""
HELP = "import sys; sys.argv = ['command', '--help']; from {}%s import main; main()"


def processor_seconds(tree: Path, *words: str) -> tuple[float, str]:
    """Seconds that a program of `words` for Python computes with the code of `tree`; its output."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise click.ClickException(f"{tree}: {done.stderr.strip()[-300:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def in_turn(trees: list[Path], repeats: int, measure: list[list[str]], told: bool) -> list[float]:
    """Medians for each tree of what `measure` runs there: its processor time, or the figure that
    it prints if `told`."""
    found: list[list[float]] = [[] for _ in trees]
    for turn in range(repeats):
        order = range(len(trees)) if turn % 2 else reversed(range(len(trees)))
        for place in order:
            seconds, output = processor_seconds(trees[place], *measure[place])
            found[place].append(float(output) if told else seconds)
    return [statistics.median(figures) for figures in found]


def reading(before: Path, tokens: int, width: int, repeats: int, folder: Path) -> str:
    """The table of epochs that both versions read from one Zarr and one HDF5 store."""
    zarr, hdf5 = folder / f"{width}.zarr", folder / f"{width}.h5"
    make_store(zarr, tokens, features_of(width, kept=16))
    convert(str(zarr), hdf5)
    rows = []
    for store in (zarr, hdf5):
        programs = [["-c", READ.format(_prefix(tree)), str(store), "3"] for tree in (before, HERE)]
        old, new = in_turn([before, HERE], repeats, programs, told=True)
        rows.append((store.suffix[1:], width, f"{old:,.0f}", f"{new:,.0f}", new / old))
    return table(("store", "width", "before, tokens/CPU s", "after", "after / before"), rows)


def _prefix(tree: Path) -> str:
    """Return the prefix of the packages in a checkout; older ones have none."""
    return "teachonce." if (tree / "teachonce/store").exists() else ""


def starts(before: Path, repeats: int) -> str:
    """The table of what `--help` of each command takes."""
    rows = []
    for command in COMMANDS:
        programs = [["-c", (HELP % command).format(_prefix(tree))] for tree in (before, HERE)]
        old, new = in_turn([before, HERE], repeats, programs, told=False)
        rows.append((f"{command} --help", old, new, new / old))
    return table(("command", "before, CPU s", "after", "after / before"), rows)


@click.command(context_settings={"show_default": True})
@click.option("--before", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--tokens", default=250_000)
@click.option("--repeats", default=7)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
def main(before: Path, tokens: int, repeats: int, results: Path) -> None:
    """Print the tables and put them into RESULTS.md."""
    with tempfile.TemporaryDirectory() as name:
        read = "\n\n".join(
            reading(before.resolve(), tokens, width, repeats, Path(name)) for width in (384, 768)
        )
    revision = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True).stdout.strip()
    publish(
        "Two versions",
        f"`python -m benchmarks.speed.versions --before DIR --tokens {tokens} --repeats {repeats}`;"
        f" before: {commit or 'no commit'}. Synthetic stores, codec default, the 16 best logits,"
        " hidden states normalised, log-probabilities and maps decoded; the best of three epochs"
        " of a process, medians of processes in turn. Times are of the processor.",
        f"{read}\n\n{starts(before.resolve(), repeats)}",
        results,
    )


if __name__ == "__main__":
    main()
