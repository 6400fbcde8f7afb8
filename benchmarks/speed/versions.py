"""What two versions take, in turn: reading, a dump, a training, and the start of each command.

    python -m benchmarks.speed.versions --before DIR      (a checkout of the other version)

Both read the very same stores. Each figure is the median of processes that take turns, and each
process reads its store once before it is timed.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from benchmarks.common.interleaved import Figures, interleaved
from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import random_teacher
from harness.synthetic import features_of, make_store
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
RUN = """
import shutil, sys
from {}%s import main
shutil.rmtree(sys.argv[sys.argv.index("--out") + 1], ignore_errors=True)
main(sys.argv[1:], standalone_mode=False)
"""
NETWORK = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
HELP = "import sys; sys.argv = ['command', '--help']; from {}%s import main; main()"


def program(tree: Path, words: Sequence[str]) -> Figures:
    """Run Python with the arguments `words` and the code of `tree`; return its CPU seconds, and the
    figure that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise click.ClickException(f"{tree}: {process.stderr.strip()[-300:]}")
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    printed = process.stdout.strip()
    return {
        "seconds": seconds,
        "printed": float(printed) if re.fullmatch(r"[\d.]+", printed) else 0.0,
    }


def both(before: Path, repeats: int, source: str, *words: str) -> list[Figures]:
    """Run a program with the code of both versions in turn; return the medians of each. `{}` in its
    source is replaced by the prefix of the packages."""
    settings = {
        str(tree): partial(program, tree, ["-c", source.format(_prefix(tree)), *words])
        for tree in (before, HERE)
    }
    return list(interleaved(settings, repeats).values())


def reading(before: Path, tokens: int, width: int, repeats: int, folder: Path) -> str:
    """Return the table of epochs that both versions read from one Zarr and one HDF5 store."""
    zarr, hdf5 = folder / f"{width}.zarr", folder / f"{width}.h5"
    make_store(zarr, tokens, features_of(width, kept=16))
    convert(str(zarr), hdf5)
    rows = []
    for store in (zarr, hdf5):
        old, new = (f["printed"] for f in both(before, repeats, READ, str(store), "3"))
        rows.append((store.suffix[1:], width, f"{old:,.0f}", f"{new:,.0f}", new / old))
    return table(("store", "width", "before, tokens/CPU s", "after", "after / before"), rows)


def commands(before: Path, model: str, corpus: str, repeats: int, folder: Path) -> str:
    """Return the table of a dump, and of a training from its store, as commands."""
    teacher = random_teacher(folder / "teacher", model, **NETWORK)
    store = str(folder / "store.zarr")
    dump = ("--model", teacher, "--corpus", corpus, "--limit", "40000", "--logits", "topk:16")
    train = ("--store", store, "--vocab", "2k", "--student", "bert:128x2x2", "--steps", "100")
    rows = []
    for name, arguments, out in (
        ("teacher_dump.cli", dump, store),
        ("student_train.cli", train, str(folder / "student")),
    ):
        results = both(before, repeats, RUN % name, *arguments, "--device", "cpu", "--out", out)
        old, new = (f["seconds"] for f in results)
        rows.append((name, old, new, new / old))
    return table(("command", "before, CPU s", "after", "after / before"), rows)


def _prefix(tree: Path) -> str:
    """Return the prefix of the packages in a checkout; older checkouts have none."""
    return "teachonce." if (tree / "teachonce/store").exists() else ""


def starts(before: Path, repeats: int) -> str:
    """Return the table of the times of `--help` of each command."""
    rows = []
    for command in COMMANDS:
        old, new = (f["seconds"] for f in both(before, repeats, HELP % command))
        rows.append((f"{command} --help", old, new, new / old))
    return table(("command", "before, CPU s", "after", "after / before"), rows)


@click.command(context_settings={"show_default": True})
@of_text(250_000)
@click.option("--before", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--repeats", default=7)
def main(model: str, corpus: str, before: Path, tokens: int, repeats: int, results: Path) -> None:
    """Print the tables and put them into RESULTS.md."""
    before = before.resolve()
    with tempfile.TemporaryDirectory() as name:
        tables = [reading(before, tokens, width, repeats, Path(name)) for width in (384, 768)]
        tables.append(commands(before, model, corpus, repeats, Path(name)))
    tables.append(starts(before, repeats))
    revision = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True).stdout.strip()
    publish(
        "Two versions",
        f"`python -m benchmarks.speed.versions --before DIR --tokens {tokens} --repeats {repeats}`;"
        f" before: {commit or 'no commit'}. Both versions read synthetic stores with the default"
        " codec and the top 16 logits; hidden states are normalized, log-probabilities and maps are"
        " decoded. A process reports the best of three epochs; the figures are medians of processes"
        " in turn. The commands dump 40,000 tokens with a random teacher of 256x2x4, and train a"
        " student of 128x2x2 for 100 steps. All times are CPU time.",
        "\n\n".join(tables),
        results,
    )


if __name__ == "__main__":
    main()
