"""Commands of several processes on loopback, as torchrun starts them, each of them watched."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.processes import command, finish, fork
from tests.end_to_end.support import Words


class Done(NamedTuple):
    """Holds the exit codes of the processes of a command, and the output of each."""

    codes: list[int]
    said: list[str]


def processes(
    count: int,
    module: str,
    words: Words,
    folder: Path,
    gradients: Path | None = None,
    stopped: int | None = None,
) -> Done:
    """Run the `main` of a module in `count` processes that train together.

    Each saves the gradient of its first step in the file `gradients`.RANK. The process with rank
    `stopped` receives a signal in its third step.
    """
    return together(
        count, folder, lambda rank: (_watched, gradients, stopped == rank, module, words)
    )


def together(count: int, folder: Path, work: Callable[[int], tuple[Any, ...]]) -> Done:
    """Call a function of a module in each of `count` processes of one training. `work` returns the
    function and its arguments for each rank."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    logs = [folder / f"{time.monotonic_ns()}.{rank}.log" for rank in range(count)]
    started = []
    for rank, log in enumerate(logs):
        printed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        printed |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(fork(_as_rank, printed if count > 1 else {}, *work(rank), log=log))
    return Done([finish(each) for each in started], [log.read_text() for log in logs])


def _as_rank(variables: dict[str, str], work: Callable[..., object], *arguments: Any) -> None:
    os.environ.update(variables)
    work(*arguments)


def _watched(gradients: Path | None, is_stopped: bool, module: str, words: Words) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    torch.set_num_threads(1)
    steps = 0

    def watch(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += 1
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if steps == 1 and gradients is not None:
            file = f"{gradients}.{os.environ.get('RANK', '0')}"
            torch.save([weight.grad for weight in weights], file)
        if steps == 3 and is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_pre_hook(watch)
    command(module, *map(str, words))
