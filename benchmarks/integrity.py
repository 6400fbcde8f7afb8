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

from benchmarks.common.results import publish, results_option, table
from teachonce.support.console import command_errors
from teachonce.support.errors import UserError

SECTIONS = {
    "checks": ("Integrity", ""),
    "forged": (
        "Forged stores",
        " Every forged store is read completely and, where possible, verified; a command runs on"
        " one store in 4. A failure is: a crash, a store that takes over 60 s of processor time or"
        " over 1 GiB, an access outside its folder, a traceback, or changed values that `verify`"
        " does not report.",
    ),
    "captures": (
        "Forged captures",
        " A capture of three samples in each format is changed in one to three ways: a value, type,"
        " shape, key or row is changed; bytes are changed; or a file is lost, emptied, swapped, or"
        " replaced by a pipe or a device. The imported values are verified and compared with those"
        " that other libraries read from the same files. A failure is: other numbers, a sample lost"
        " silently, a traceback, a crash, or an import that takes over 60 s of processor time or"
        " over 1 GiB.",
    ),
    "dead-ends": (
        "Dead ends",
        " In each case, one file, group or array of one part or outside the parts (or two of the"
        " teacher's weights) is emptied, lost, truncated or duplicated. Then one of four commands"
        " is run, and after it the command that its last line advises, until `verify` finds the"
        " store sound and its content is the original content. A dead end is advice that is"
        " missing, does not work or leads in a circle.",
    ),
    "hard-places": (
        "Hard places",
        " Each command runs in four places: on a disk with few free bytes, on a disk with few free"
        " inodes, as a user who owns neither its inputs nor its output folder (umask 077), and with"
        " a kill after a random time. A command that failed is run again in a good place, with"
        " --resume if it has that option. A store is then verified, and stores and weights are"
        " compared with those of an undisturbed command. A failure is: a traceback, more than one"
        " line of error, a command that cannot continue, temporary files that are left over, or"
        " different content.",
    ),
    "hubs": (
        "Hostile hubs",
        " A hub on this machine answers one kind of request wrongly: bodies that never end, arrive"
        " in small pieces or are compressed, wrong lengths, redirects, endless pages, names that"
        " lead out of the cache, JSON of wrong shapes. A failure is: a traceback, a command that"
        " takes over 300 s, over 8 GiB of address space or a file over 1 GiB, or a file outside"
        " of its folders.",
    ),
    "kills": (
        "Kills among processes",
        " Three readers of a store in a bucket share a disk cache that is smaller than the store."
        " One reader is killed at a random moment and replaced. For one kill in five, one of two"
        " students that a sweep trains is killed as well, as if memory ran out. A failure is: other"
        " texts or hidden states, a cache over its limit, or a sweep that does not report the"
        " killed student, stops the other student, or does not train the killed student when the"
        " command is run again.",
    ),
}
"""Title of each section, and its description of the check."""

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
@results_option
@command_errors
def main(what: str, seed: int, results: Path, **options: Any) -> None:
    """Print the table and write it to RESULTS.md; return exit code 1 if any check fails."""
    specific = {name for names in SETTINGS.values() for name in names}
    names = SETTINGS.get(what, options.keys() - specific)
    settings = {"seed": seed, **{name: options[name] for name in names}}
    argv = [sys.executable, "-m", "tests.integrity", what, json.dumps(settings)]
    root = Path(__file__).parents[1]
    process = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=root)
    if process.returncode:
        raise UserError(f"the checks ended with exit code {process.returncode}")
    head, rows, wrong = json.loads(process.stdout.splitlines()[-1])
    flags = " ".join(f"--{name} {options[name]}" for name in SETTINGS.get(what, ()))
    command = f"python -m benchmarks.integrity {what} {flags}".rstrip()
    title, about = SECTIONS[what]
    publish(title, f"`{command}`; seed {seed}.{about}", table(head, rows), results)
    for line in wrong[:50]:
        click.echo(line)
    if wrong:
        raise UserError(f"{len(wrong)} case(s) are not as they must be")


if __name__ == "__main__":
    main()
