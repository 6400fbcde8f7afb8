"""A Ray cluster on this machine, and dumps that are made by it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from harness.processes import fork, in_small_parts
from teachonce.store.write.part_queue import PartQueue


class Ray:
    """Holds a cluster of nodes on loopback, and drivers of a dump on it."""

    def __init__(
        self, words: Sequence[str | Path | int], out: Path, log: Path, head_cpus: int
    ) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": head_cpus, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.words, self.out, self.log = words, out, log

    def begin(self, *options: str | int) -> ForkServerProcess:
        """Start a driver."""
        arguments = (*self.words, "--ray", self.cluster.address, *options)
        return fork(in_small_parts, *arguments, log=self.log)

    def add_node(self) -> Any:
        """Add a node with one worker."""
        return self.cluster.add_node(num_cpus=1)

    def makers(self) -> list[int]:
        """Return the numbers of the processes that make a part now."""
        queue, pids = PartQueue(self.out), []
        for number in queue.leased():
            with suppress(OSError, ValueError):
                lease = json.loads((queue.folder / f".{number}.lease").read_text())
                pids.append(int(lease["pid"]))
        return pids

    def wait_for_a_maker(self, driver: ForkServerProcess) -> list[int]:
        """Wait until a part is being made, or the driver has ended; return the processes that make
        parts."""
        while not (pids := self.makers()) and driver.is_alive():
            time.sleep(0.01)
        return pids
