"""Joins or starts a Ray cluster, and counts the workers for which it has room. Workers must have
the driver's versions and folder. Only Ray Core is used, and it is imported only when it is
needed."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.support.errors import UserError, first_line
from teachonce.support.lease import Lease, lease_path
from teachonce.support.packages import installed
from teachonce.support.signals import Stop

AUTO = "auto"
ANSWER = 5.0  # seconds to wait for an address to answer
# The first variable stops Ray from sending usage statistics. Without the second one, newer releases
# of Ray leave GPUs visible to workers that have none.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}


def check_address(address: str) -> None:
    """Raise UserError unless the address is `auto`, `local` or `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    if address not in (AUTO, "local") and not (host and port.isdecimal() and "/" not in host):
        raise UserError(
            f"--ray {address}: expected HOST:PORT, such as 10.0.0.1:6379, or local, or no value;"
            " run the command on a node of the cluster"
        )


def check_gpus(gpus: float) -> None:
    """Raise UserError unless `gpus` is a fraction of one GPU, or a number of whole GPUs."""
    if gpus > 1 and gpus % 1:
        raise UserError(
            f"--ray-gpus {gpus:g}: expected a share of one GPU, or whole GPUs, such as 0.5 or 2"
        )


@dataclass(frozen=True)
class DriverNode:
    """Describes the driver's node, so that a worker checks that its own node shares the driver's
    disk and versions. The worker's node must have the folder in which the command was typed, a
    lease of the output `driven` that contains the driver's `token`, and the same installed
    versions."""

    folder: str
    driven: Path
    token: str
    installed: dict[str, str]

    @classmethod
    def here(cls, driven: Path, lease: Lease) -> DriverNode:
        """Describe this process, the driver."""
        return cls(os.getcwd(), driven, lease.token, installed())

    def enter(self) -> None:
        """Change to the driver's folder. Raises UserError if this node differs from the
        driver's."""
        local = installed()
        for name, expected in self.installed.items():
            if local.get(name) != expected:
                raise UserError(
                    f"{name} is {local.get(name)} on this node and {expected} on the driver's;"
                    " install the same version on every node"
                )
        os.chdir(self.folder)
        lease = lease_path(self.driven)
        if not lease.exists() or self.token not in lease.read_text():
            raise UserError(
                f"{lease.parent} on this node is not the same folder as on the driver; --out must"
                " be on a disk that all nodes share, under the same path"
            )


def remote_worker(ray: Any, work: Callable[..., Any], gpus: float) -> Any:
    """Make a Ray task that calls `work` in a process of its own, on a node with room for it. Ray
    does not restart it: the driver starts another one if it dies."""
    # max_calls=1: by default Ray gives a process without a GPU to the next task, memory included.
    return ray.remote(
        num_cpus=1, num_gpus=gpus, max_retries=0, max_calls=1, scheduling_strategy="SPREAD"
    )(work)


@contextmanager
def cluster(ray: Any, address: str, stop: Stop) -> Iterator[None]:
    """Connect to a cluster as its driver until the end of the `with` block. `stop` continues to
    handle signals. Raises UserError if the cluster does not answer or cannot be started."""
    if ":" in address:
        _check_answers(address)
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    try:
        ray.init(
            # With its own `auto`, Ray fails if no cluster runs; without an address it starts one.
            address=None if address == AUTO else address,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            include_dashboard=False if address == "local" else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--ray {address}: Ray cannot join or start the cluster: {short(error)}"
        ) from None
    try:
        stop.listen()  # `ray.init` has set a signal handler of its own
        yield
    except KeyboardInterrupt:
        stop.check()  # Ray raises a KeyboardInterrupt without the number of the signal
        raise
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--ray {address}: no cluster answers at this address ({first_line(error)}); start the"
            " cluster with `ray start --head`, or give --ray local for a cluster of this machine"
            " alone"
        ) from None


def short(error: BaseException) -> str:
    """Return an error of Ray as one line."""
    return " ".join(str(error).split())[:300]


def gpus_of_worker(ray: Any, asked: float | None, device: str) -> float:
    """Return the number of GPUs of one worker: `asked` if given, else 1 if any node has a GPU and
    `device` allows it."""
    if asked is not None:
        return asked
    return float(not device.startswith("cpu") and ray.cluster_resources().get("GPU", 0) >= 1)


def worker_capacity(ray: Any, address: str, gpus: float) -> tuple[int, int]:
    """Count the nodes, and the workers of one CPU and `gpus` GPUs each that they have room for.

    Raises UserError if the cluster is only this machine and has no room.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    slots = sum(node_capacity(node, gpus) for node in nodes)
    if not slots and address == "local":
        raise UserError(
            f"--ray local: this machine has no free resources for a worker of 1 CPU and {gpus:g}"
            " GPU; give --ray-gpus 0, or the address of a cluster as --ray HOST:PORT"
        )
    return len(nodes), slots


def node_capacity(node: dict[str, float], gpus: float) -> int:
    """Count the workers of one CPU and `gpus` GPUs each that a node has room for."""
    slots = math.floor(node.get("CPU", 0))
    if gpus:
        total = math.floor(node.get("GPU", 0))
        # A worker needs its share on one GPU. Without 1e-9, shares of 1/99 would give 98 slots.
        by_gpu = total * math.floor(1 / gpus + 1e-9) if gpus < 1 else math.floor(total / gpus)
        slots = min(slots, by_gpu)
    return slots
