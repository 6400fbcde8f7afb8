"""A Ray cluster dumps one store while workers, drivers and nodes are killed at random.

    nice python -m benchmarks.ray_kills [--kills 100] [--nodes 2]

Each finished store must be the one that a single process makes: the same SHA-256 of every array,
nothing left beside it. Otherwise the script fails. The cluster's nodes are processes of this
machine; its head, which has no worker, lives on. Half of the stores are Zarr, half HDF5.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import click

from benchmarks.common.processes import PART_TOKENS, finish, fork, in_small_parts
from benchmarks.common.results import RESULTS, publish, table
from benchmarks.reliability import Job, Words, content_of_store, jobs
from teachonce.store.write.part_queue import PartQueue
from teachonce.support.console import command_errors

STRIKES = 5  # of one store
TEXTS = 400  # so many that parts are still made when a worker has begun anew
HEAD = ("", "SIGKILLs", "of workers", "of drivers", "of nodes", "stores", "equal")
VICTIMS = ("worker", "driver", "node")


class Ray:
    """A cluster of nodes on loopback, and drivers of a dump on it."""

    def __init__(self, words: Words, out: Path, log: Path, head_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": head_cpus, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.words, self.out, self.log = words, out, log

    def begin(self, *more: str | int) -> ForkServerProcess:
        """Start a driver."""
        words = (*self.words, "--ray", self.cluster.address, *more)
        return fork(in_small_parts, *words, log=self.log)

    def add_node(self) -> Any:
        """Let a node of one worker join."""
        return self.cluster.add_node(num_cpus=1)

    def makers(self) -> list[int]:
        """Return the numbers of the processes that make a part now."""
        queue, found = PartQueue(self.out), []
        for number in queue.leased():
            with suppress(OSError, ValueError):
                lease = json.loads((queue.folder / f".{number}.lease").read_text())
                found.append(int(lease["pid"]))
        return found

    def wait_for_a_maker(self, driver: ForkServerProcess) -> list[int]:
        """Wait until a part is made, or the driver has ended; return who makes one."""
        while not (found := self.makers()) and driver.is_alive():
            time.sleep(0.01)
        return found


@dataclass
class Siege:
    """The store of a job, made by a cluster whose members are killed and replaced."""

    job: Job
    nodes: int
    struck: Counter[str] = field(default_factory=Counter)

    def trial(self, chance: random.Random, strikes: int) -> int:
        """Make the store while members are killed; return how many were. Raises RuntimeError where
        it is not the undisturbed one."""
        self.job.clear()
        ray = Ray(self.job.words, self.job.out, self.job.log, head_cpus=0)
        try:
            nodes = [ray.add_node() for _ in range(self.nodes)]
            driver, killed = ray.begin(), 0
            for victim in chance.choices(VICTIMS, k=strikes):
                if not (makers := ray.wait_for_a_maker(driver)):
                    break
                time.sleep(chance.uniform(0, self.job.seconds / 4))
                if victim == "worker":
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(makers), signal.SIGKILL)
                elif victim == "driver":
                    driver.kill()
                    finish(driver)
                    driver = ray.begin()
                else:
                    place = chance.randrange(self.nodes)
                    ray.cluster.remove_node(nodes[place], allow_graceful=False)
                    nodes[place] = ray.add_node()
                self.struck[victim] += 1
                killed += 1
            code = finish(driver, 600)
        finally:
            ray.cluster.shutdown()
        if code or content_of_store(self.job.out) != self.job.wanted:
            raise RuntimeError(f"{self.job.name}: {code}, {self.job.log.read_text()[-2000:]}")
        return killed

    def row(self, kills: int, seed: int) -> list[object]:
        """Kill so many; a row of the table."""
        chance = random.Random(f"{self.job.name} {seed}")
        killed = stores = 0
        while killed < kills:
            killed += self.trial(chance, min(STRIKES, kills - killed))
            stores += 1
            click.echo(f"{self.job.name}: {killed} kills, {stores} stores", err=True)
        struck = (self.struck[victim] for victim in VICTIMS)
        return [f"{self.job.name}, {self.nodes} nodes", killed, *struck, stores, stores]


@click.command()
@click.option("--kills", default=100, help="Half of them for each format.")
@click.option("--nodes", default=2)
@click.option("--seed", default=0)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work.  [default: /tmp]")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, hidden=True)
@command_errors
def main(kills: int, nodes: int, seed: int, folder: Path | None, results: Path) -> None:
    """Print the table and put it into RESULTS.md."""
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for job in itertools.islice(jobs(Path(name), TEXTS), 2):
            job.undisturbed()
            rows.append(Siege(job, nodes).row(kills // 2, seed))
    publish(
        "A Ray cluster, one store: killed",
        f"`python -m benchmarks.ray_kills --kills {kills} --nodes {nodes}`; a random teacher of 2"
        f" layers, parts of {PART_TOKENS} tokens, 2 views; nodes of one worker each, on loopback."
        f" Up to {STRIKES} times a store, while parts are made, a random worker, the driver or a"
        " node with all that runs on it is killed, and the driver or node is replaced. Compared are"
        " the SHA-256 of all arrays, the texts in order, `verify`, and what lies beside.",
        table(HEAD, rows),
        results,
    )


if __name__ == "__main__":
    main()
