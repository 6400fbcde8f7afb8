"""How many of the project's files and functions a dump and a training pass, in two versions.

    python -m benchmarks.walks [--before DIR] [--files]      (DIR: a checkout of another version)

Both versions dump the same text with the same small random teacher, and train one step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from benchmarks.common.results import of_text, publish, table
from benchmarks.common.small_store import random_teacher

HERE = Path(__file__).parents[1]
NETWORK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LOSSES = ("mlm=1", "hidden=30", "kl=1")
WALKS = {
    "dump": "dump, from the first document to the end",
    "start": "student-train, until the first batch leaves the store",
    "batch": "student-train, a batch from the store's stream to the summed loss",
}
Walks = dict[str, list[tuple[str, str]]]
"""File and name of each function, by walk."""


def walks(
    tree: Path, folder: Path, teacher: str, corpus: str, tokens: int
) -> tuple[Walks, dict[str, int]]:
    """Dump and train with the code of a checkout; return the functions passed, and the calls of
    those that are counted."""
    store = str(folder / "store.zarr")
    dump = ("--model", teacher, "--corpus", corpus, "--out", store, "--limit", str(tokens))
    losses = [word for loss in LOSSES for word in ("--loss", loss)]
    train = ("--store", store, "--vocab", "teacher", "--student", "32x1x2", "--steps", "1")
    out = ("--held-out", "0", "--out", str(folder / "student"))
    dumped, _ = _run(tree, "dump", *dump)
    trained, calls = _run(tree, "train", *train, *losses, *out)
    return {**dumped, **trained}, calls


def _run(tree: Path, *words: str) -> tuple[Walks, dict[str, int]]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-P", str(HERE / "benchmarks/common/walk.py"), str(tree)]
    done = subprocess.run(
        [*program, *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(f"{tree}: {done.stderr.strip()[-3000:]}")
    functions, calls = json.loads(done.stdout.splitlines()[-1])
    return functions, calls


def rows(versions: list[tuple[Walks, dict[str, int]]]) -> list[list[object]]:
    """Make the rows of the table: files and functions of each walk, and calls."""
    found = list[list[object]]()
    for walk, label in WALKS.items():
        passed = [functions[walk] for functions, _ in versions]
        found.append([label, "files", *(len({file for file, _ in each}) for each in passed)])
        found.append([label, "functions", *map(len, passed)])
    for name in sorted({name for _, calls in versions for name in calls}):
        found.append([f"student-train, `{name}`", "calls", *(c.get(name, 0) for _, c in versions)])
    return found


def listing(passed: Walks) -> str:
    """List the files of each walk, and how many of their functions run."""
    lines = list[str]()
    for walk, label in WALKS.items():
        lines += ["", label]
        counts = Counter(file for file, _ in passed[walk])
        lines += [f"{count:5}  {file}" for file, count in sorted(counts.items())]
    return "\n".join(lines)


@click.command()
@of_text(2000)
@click.option("--before", type=click.Path(path_type=Path, exists=True), help="Another version.")
@click.option("--files", is_flag=True, help="List the files of each walk; write no section.")
def main(
    model: str, corpus: str, tokens: int, results: Path, before: Path | None, files: bool
) -> None:
    """Print the table and put it into RESULTS.md."""
    trees = [*([before.resolve()] if before else []), HERE]
    found = []
    with tempfile.TemporaryDirectory() as name:
        teacher = random_teacher(Path(name) / "teacher", model, head=True, **NETWORK)
        for number, tree in enumerate(trees):
            folder = Path(name) / str(number)
            folder.mkdir()
            found.append(walks(tree, folder, teacher, corpus, tokens))
    columns = [f"at {commit(tree)}" for tree in trees]
    made = table(["a run of", "counted", *columns], rows(found))
    if files:
        print(listing(found[-1][0]), made, sep="\n\n")
        return
    publish(
        "Files and functions on a walk",
        f"`python -m benchmarks.walks{' --before DIR' if before else ''} --tokens {tokens}`; a"
        " teacher of 2 layers of 32 and a student of 1; losses"
        f" {' '.join(LOSSES)}. Functions of the product that are called, resumed or returned from;"
        " no bodies of modules or classes, lambdas or comprehensions.",
        made,
        results,
    )


def commit(tree: Path) -> str:
    """Return the short hash of the commit that a folder is at."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "no commit"


if __name__ == "__main__":
    main()
