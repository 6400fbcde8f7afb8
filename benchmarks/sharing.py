"""Several processes, or a Ray cluster, dump one store, and are killed at random.

    nice python -m benchmarks.sharing [--kills 100] [--processes 3]
    nice python -m benchmarks.sharing [--kills 100] --ray-nodes 2

Each finished store must be the one that a single process makes: the same SHA-256 of every array,
nothing left next to it. Otherwise the script fails. Half of the stores are Zarr, half HDF5. The
nodes of the cluster are processes of this machine; its head, which has no worker, lives on.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import ClassVar

import click

from benchmarks.common.results import publish, results_option, table
from benchmarks.reliability import Job, jobs
from harness.processes import finish, fork, in_small_parts
from harness.ray_cluster import Ray
from harness.store_content import content_of_store
from teachonce.support.console import command_errors
from teachonce.support.lease import lease_path

STRIKES = 5  # of one store


@dataclass
class Siege(ABC):
    """Dumps a store with `size` processes that are killed and replaced."""

    job: Job
    size: int
    struck: Counter[str] = field(default_factory=Counter)
    members: ClassVar[str]
    victims: ClassVar[dict[str, str]]
    """Holds a column of the table for each kind of victim."""

    @abstractmethod
    def made(self, chance: random.Random, strikes: int) -> list[int]:
        """Make the store and kill up to `strikes` members meanwhile, counted in `struck`. Return
        the exit codes of the members that end by themselves."""

    def trial(self, chance: random.Random, strikes: int) -> None:
        """Make the store while members are killed. Raises RuntimeError if it differs from the
        undisturbed store."""
        self.job.clear()
        codes = self.made(chance, strikes)
        if any(codes) or content_of_store(self.job.out) != self.job.wanted:
            raise RuntimeError(f"{self.job.name}: {codes}, {self.job.log.read_text()[-2000:]}")

    def row(self, kills: int, seed: int) -> list[object]:
        """Make stores until `kills` members were killed; return a row of the table."""
        chance = random.Random(f"{self.job.name} {seed}")
        stores = 0
        while (killed := self.struck.total()) < kills:
            self.trial(chance, min(STRIKES, kills - killed))
            stores += 1
            click.echo(f"{self.job.name}: {self.struck.total()} kills, {stores} stores", err=True)
        name = f"{self.job.name}, {self.size} {self.members}"
        return [name, killed, *(self.struck[victim] for victim in self.victims), stores, stores]

    @classmethod
    def head(cls) -> tuple[str, ...]:
        """Return the head of the table."""
        return (
            "",
            "SIGKILLs",
            *cls.victims.values(),
            "stores",
            "stores equal to an undisturbed run",
        )


class Crew(Siege):
    """Processes that make a store together."""

    members = "processes"
    victims: ClassVar = {
        "cutting": "of the process that cuts the corpus",
        "making": "of a process that waits or makes parts",
    }

    def begin(self, shard: int) -> ForkServerProcess:
        """Start the process of a shard."""
        command = (*self.job.words, "--shard", f"{shard}/{self.size}")
        return fork(in_small_parts, *command, log=self.job.log)

    def made(self, chance: random.Random, strikes: int) -> list[int]:
        workers = [self.begin(shard) for shard in range(self.size)]
        for _ in range(strikes):
            time.sleep(chance.uniform(0, self.job.seconds / 2))
            shard = chance.randrange(self.size)
            role = "cutting" if self._cuts(workers[shard]) else "making"
            workers[shard].kill()
            if finish(workers[shard]) == -signal.SIGKILL:
                self.struck[role] += 1
            workers[shard] = self.begin(shard)
        return [finish(worker) for worker in workers]

    def _cuts(self, worker: ForkServerProcess) -> bool:
        with suppress(OSError, ValueError):
            return bool(json.loads(lease_path(self.job.out).read_bytes())["pid"] == worker.pid)
        return False


class RayCluster(Siege):
    """Dumps on a Ray cluster in which a worker, the driver, or a whole node is killed."""

    members = "nodes"
    victims: ClassVar = {"worker": "of workers", "driver": "of drivers", "node": "of nodes"}

    def made(self, chance: random.Random, strikes: int) -> list[int]:
        ray = Ray(self.job.words, self.job.out, self.job.log, head_cpus=0)
        try:
            nodes = [ray.add_node() for _ in range(self.size)]
            driver = ray.begin()
            for victim in chance.choices(list(self.victims), k=strikes):
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
                    index = chance.randrange(self.size)
                    ray.cluster.remove_node(nodes[index], allow_graceful=False)
                    nodes[index] = ray.add_node()
                self.struck[victim] += 1
            return [finish(driver, 600)]
        finally:
            ray.cluster.shutdown()


COMPARED = (
    "The stores, the teacher and the comparison are the same as in [Never lose a"
    " dump](#never-lose-a-dump)."
)
OF_PROCESSES = (
    f"Several processes dump one store. Up to {STRIKES} times per store, at a random moment within"
    " half of the undisturbed duration, one process is chosen at random, killed and replaced; the"
    f" others continue. {COMPARED}"
)
OF_RAY = (
    "A Ray cluster dumps one store, on loopback, with one worker per node. Up to"
    f" {STRIKES} times per store, while parts are made, one of these is killed at random: a worker,"
    " the driver, or a node with everything that runs on it. A killed driver or node is replaced."
    f" {COMPARED}"
)
RAY_TEXTS = 400  # enough for parts to be left when a worker has started again


@click.command()
@click.option("--kills", default=100, help="Half of them for each format.")
@click.option("--processes", default=3, help="That make one store.")
@click.option("--ray-nodes", type=click.IntRange(min=1), help="A Ray cluster of N nodes instead.")
@click.option("--seed", default=0)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work.  [default: /tmp]")
@results_option
@command_errors
def main(
    kills: int,
    processes: int,
    ray_nodes: int | None,
    seed: int,
    folder: Path | None,
    results: Path,
) -> None:
    """Print the table and write it to RESULTS.md."""
    kind: type[Siege] = RayCluster if ray_nodes else Crew
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        all_jobs = jobs(Path(name), RAY_TEXTS) if ray_nodes else jobs(Path(name))
        for job in itertools.islice(all_jobs, 2):
            job.undisturbed()
            rows.append(kind(job, ray_nodes or processes).row(kills // 2, seed))
    size = f"--ray-nodes {ray_nodes}" if ray_nodes else f"--processes {processes}"
    publish(
        "A Ray cluster, one store: killed" if ray_nodes else "Several processes, one store: killed",
        f"`python -m benchmarks.sharing --kills {kills} {size}`."
        f" {OF_RAY if ray_nodes else OF_PROCESSES}",
        table(kind.head(), rows),
        results,
    )


if __name__ == "__main__":
    main()
