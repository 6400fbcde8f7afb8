"""Commands in processes that start at once: each is forked from one that has imported everything.

    python -m harness.processes teachonce.teacher_dump.cli --model DIR ...

does in a new process what `in_small_parts` does in a forked one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from teachonce.support.errors import UserError

PART_TOKENS = 400
IMPORTED = [
    "teachonce.teacher_dump.cli",
    "teachonce.teacher_dump.job.dump",
    "teachonce.teacher_dump.job.sharing",
    "teachonce.student_train.cli",
    "teachonce.student_train.output.run",
    "teachonce.downstream.cli",
    "teachonce.downstream.tasks.fine_tune",
    "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.modernbert.modeling_modernbert",
    "seqeval.metrics",
    "sklearn.metrics",
    "harness.server",
]
ALONE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@functools.cache
def _context() -> Any:
    """Start the server from which processes are forked. It has one thread and has computed nothing,
    so a fork is equivalent to a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    os.environ.update(ALONE)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def fork(
    work: Callable[..., object], *arguments: Any, log: Path | None = None
) -> ForkServerProcess:
    """Start a process that calls a function of a module; its output is appended to `log`."""
    if log is not None:
        log.touch()
    process: ForkServerProcess = _context().Process(target=_child, args=(log, work, arguments))
    process.start()
    return process


def _child(log: Path | None, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    work(*arguments)


def command(module: str, *arguments: str | Path | int) -> None:
    """Run the `main` of a module with these arguments, as the shell would; ends the process."""
    import_module(module).main([str(a) for a in arguments])


def in_small_parts(module: str, *arguments: str | Path | int) -> None:
    """Do as `command`, with dumps in parts of PART_TOKENS tokens, so that a small dump has many."""
    from teachonce.teacher_dump.job import dump, on_ray, sharing
    from teachonce.teacher_dump.job.options import DumpOptions

    def small(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(options: DumpOptions, *args: Any, **kwargs: Any) -> Any:
            return function(replace(options, part_tokens=PART_TOKENS), *args, **kwargs)

        return run

    with (
        mock.patch.object(dump, "dump", small(dump.dump)),
        mock.patch.object(sharing, "share", small(sharing.share)),
        mock.patch.object(on_ray, "share_on_ray", small(on_ray.share_on_ray)),
    ):
        command(module, *arguments)


def in_own_process(module: str, *arguments: str | Path, jobs: int = 1) -> None:
    """Run the `main` of a module in a separate process, with its share of the cores.

    Raises UserError if the process fails.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    code = finish(fork(_with_threads, threads, module, *arguments), seconds=None)
    if code != 0:
        command = shlex.join([module, *map(str, arguments)])
        raise UserError(f"{command}: ended with exit code {code}; its output is above")


def _with_threads(threads: int, module: str, *arguments: str | Path) -> None:
    import torch

    torch.set_num_threads(threads)
    command(module, *arguments)


def finish(process: ForkServerProcess, seconds: float | None = 300) -> int:
    """Wait for the end of a process; return its exit code, negative for a signal."""
    process.join(seconds)
    code = process.exitcode
    if code is None:
        process.kill()
        raise TimeoutError(f"process {process.pid} has not ended in {seconds:g} s")
    return code


if __name__ == "__main__":
    os.environ.update(ALONE)
    in_small_parts(*sys.argv[1:])
