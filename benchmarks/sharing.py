"""Several processes dump one store, and are killed at random while others go on.

    nice python -m benchmarks.sharing [--kills 100] [--processes 3]

Each finished store must be the one that a single process makes: the same SHA-256 of every array,
nothing left beside it. Otherwise the script fails. Half of the stores are Zarr, half HDF5.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import click

from benchmarks.common.processes import PART_TOKENS, finish, fork, in_small_parts
from benchmarks.common.results import RESULTS, publish, table
from benchmarks.reliability import Job, content_of_store, jobs
from teachonce.support.console import command_errors
from teachonce.support.lease import lease_path

STRIKES = 5  # of one store
KILLED = ("", "SIGKILLs", "who cut the corpus", "who waited or made parts", "stores", "equal")


@dataclass
class Crew:
    """Processes that make the store of a job together; whoever is killed is replaced."""

    job: Job
    size: int
    struck: Counter[str] = field(default_factory=Counter)

    def begin(self, place: int) -> ForkServerProcess:
        words = (*self.job.words, "--shard", f"{place}/{self.size}")
        return fork(in_small_parts, *words, log=self.job.log)

    def trial(self, chance: random.Random, strikes: int) -> int:
        """Make the store while some are killed; returns how many. Raises RuntimeError where it is
        not the undisturbed one."""
        self.job.clear()
        workers = [self.begin(place) for place in range(self.size)]
        killed = 0
        for _ in range(strikes):
            time.sleep(chance.uniform(0, self.job.seconds / 2))
            place = chance.randrange(self.size)
            role = "cutting" if self._cuts(workers[place]) else "making"
            workers[place].kill()
            if finish(workers[place]) == -signal.SIGKILL:
                self.struck[role] += 1
                killed += 1
            workers[place] = self.begin(place)
        codes = [finish(worker) for worker in workers]
        if any(codes) or content_of_store(self.job.out) != self.job.wanted:
            raise RuntimeError(f"{self.job.name}: {codes}, {self.job.log.read_text()[-2000:]}")
        return killed

    def _cuts(self, worker: ForkServerProcess) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads(lease_path(self.job.out).read_bytes())["pid"] == worker.pid)
        return False

    def row(self, kills: int, seed: int) -> list[object]:
        """Kill so many; a row of the table."""
        chance = random.Random(f"{self.job.name} {seed}")
        killed = stores = 0
        while killed < kills:
            killed += self.trial(chance, min(STRIKES, kills - killed))
            stores += 1
        return [
            *(f"{self.job.name}, {self.size} processes", killed),
            *(self.struck["cutting"], self.struck["making"], stores, stores),
        ]


def killed_rows(folder: Path, kills: int, processes: int, seed: int) -> list[list[object]]:
    """Rows of the stores of both formats."""
    rows = []
    for job in itertools.islice(jobs(folder), 2):
        job.undisturbed()
        rows.append(Crew(job, processes).row(kills // 2, seed))
        click.echo(f"{rows[-1]} ({job.seconds:.1f} s undisturbed)", err=True)
    return rows


@click.command()
@click.option("--kills", default=100, help="Half of them for each format.")
@click.option("--processes", default=3, help="That make one store.")
@click.option("--seed", default=0)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work.  [default: /tmp]")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(kills: int, processes: int, seed: int, folder: Path | None, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rows = killed_rows(Path(name), kills, processes, seed)
    publish(
        "Several processes, one store: killed",
        f"`python -m benchmarks.sharing --kills {kills} --processes {processes}`; a random"
        f" teacher of 2 layers, parts of {PART_TOKENS} tokens, 2 views. Up to {STRIKES}"
        " times a store, at a random moment of half the undisturbed duration, a random one"
        " of the processes is killed and replaced while the others go on. Compared are the"
        " SHA-256 of all arrays, the texts in order, `verify`, and what lies beside.",
        table(KILLED, rows),
        results,
    )


if __name__ == "__main__":
    main()
