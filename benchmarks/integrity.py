"""Damaged and forged stores that are found, sound ones that pass, odd texts that survive.

    python -m benchmarks.integrity [checks] [--flips N] [--stores N] [--forgeries N] ...
    python -m benchmarks.integrity forged [--hdf5 20000] [--zarr 20000]
    python -m benchmarks.integrity captures [--captures 5000]
    python -m benchmarks.integrity dead-ends [--cases N]
    python -m benchmarks.integrity hard-places [--times N]
    python -m benchmarks.integrity hubs [--hubs N]
    python -m benchmarks.integrity kills [--kills N]

The checks are those of tests/integrity, which the test suite runs small. They run in a process of
their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.common.results import RESULTS, publish, table
from teachonce.support.console import command_errors
from teachonce.support.errors import UserError

SECTIONS = {
    "checks": ("Integrity", ""),
    "forged": (
        "Forged stores",
        " Every store is read whole and, where it can be, verified; a command runs on one in 4."
        " Otherwise would be: a crash, a store that takes over 60 s of processor time or 1 GiB, a"
        " look outside its folder, a traceback, or other values that verify does not report.",
    ),
    "captures": (
        "Forged captures",
        " A capture of three samples in each format is changed in one to three ways: a value, a"
        " type, a shape, a key or a row; bytes; a file lost, emptied or swapped, or a pipe or a"
        " device in its place. What is imported is compared with what other libraries read of the"
        " same files, and verified. Otherwise would be: other numbers, a sample lost in silence, a"
        " traceback, a crash, or an import that takes over 60 s of processor time or 1 GiB.",
    ),
    "dead-ends": (
        "Dead ends",
        " Each file, group and array of one part and outside the parts (two of the teacher's"
        " weights) is emptied, lost, truncated or doubled. Then one of four commands is typed, and"
        " what its last line advises, until `verify` finds the store sound with the content that"
        " it had.",
    ),
    "hard-places": (
        "Hard places",
        " Each command runs on a disk on which few bytes or few inodes are free, as a user who owns"
        " neither its inputs nor the folder of its output (umask 077), and is killed after a random"
        " time. What failed is typed again in a good place, with --resume where there is one; a"
        " store is then verified, and stores and weights are compared with those of an undisturbed"
        " command."
        " Otherwise would be: a traceback, more than one line of error, a command that cannot go"
        " on, temporary files that are left, another content.",
    ),
    "hubs": (
        "Hostile hubs",
        " A hub on this machine answers one kind of request in another way: bodies without an end,"
        " in drops or packed, lengths that are wrong, redirects, pages without an end, names that"
        " lead out of the cache, JSON of wrong shapes. Otherwise would be: a traceback, a command"
        " over 300 s, 8 GiB of addresses or 1 GiB of a file, a file outside of its folders.",
    ),
    "kills": (
        "Kills among processes",
        " One of three readers of a store in a bucket, which share a disk cache smaller than the"
        " store, is killed at a random moment and replaced; and, for one kill in five, one of two"
        " students that a sweep trains, as when memory runs out. Otherwise would be: other texts or"
        " states, a cache over its bound, a sweep that does not report the student, stop the other"
        " one or train it when the command is typed again.",
    ),
}
"""Title of each section, and what it says of the check."""

SETTINGS = {
    "forged": ("hdf5", "zarr"),
    "captures": ("captures",),
    "dead-ends": ("cases",),
    "hard-places": ("times",),
    "hubs": ("hubs",),
    "kills": ("kills",),
}
"""Options of each check; the first takes all others."""


@click.command()
@click.argument("what", type=click.Choice(list(SECTIONS)), default="checks")
@click.option("--flips", default=1000, help="Flipped bits for each format.")
@click.option("--stores", default=50, help="Sound stores.")
@click.option("--forgeries", default=2000, help="Forged stores.")
@click.option("--launderings", default=1000, help="Altered stores that are copied, at most all.")
@click.option("--edits", default=500, help="Corpora that are edited while they are dumped.")
@click.option("--tokenizers", default=200, help="Stores with an untrusted tokenizer or settings.")
@click.option("--networks", default=200, help="Networks that lose and alter answers of S3.")
@click.option("--characters", default=0x110000, help="Code points of Unicode, from the first.")
@click.option("--texts", default=100_000, help="Odd texts.")
@click.option("--hdf5", default=20_000, help="forged: HDF5 stores.")
@click.option("--zarr", default=20_000, help="forged: Zarr stores.")
@click.option("--captures", default=5000, help="captures: of each format.")
@click.option("--cases", type=int, help="dead-ends: damages to each of eight stores.")
@click.option("--times", default=2, help="hard-places: of each command in each place.")
@click.option("--hubs", default=300, help="hubs: pairs of a request and a twist.")
@click.option("--kills", default=100, help="kills: of readers; of students a fifth.")
@click.option("--seed", default=0)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(what: str, seed: int, results: Path, **options: Any) -> None:
    """Print the table and put it into RESULTS.md; exit code 1 if anything is not as it must be."""
    others = {name for names in SETTINGS.values() for name in names}
    names = SETTINGS.get(what, options.keys() - others)
    settings = {"seed": seed, **{name: options[name] for name in names}}
    words = [sys.executable, "-m", "tests.integrity", what, json.dumps(settings)]
    root = Path(__file__).parents[1]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=root)
    if done.returncode:
        raise UserError(f"the checks ended with exit code {done.returncode}")
    head, rows, wrong = json.loads(done.stdout.splitlines()[-1])
    said = " ".join(f"--{name} {options[name]}" for name in SETTINGS.get(what, ()))
    command = f"python -m benchmarks.integrity {what} {said}".rstrip()
    title, about = SECTIONS[what]
    publish(title, f"`{command}`; seed {seed}.{about}", table(head, rows), results)
    for line in wrong[:50]:
        click.echo(line)
    if wrong:
        raise UserError(f"{len(wrong)} case(s) are not as they must be")


if __name__ == "__main__":
    main()
