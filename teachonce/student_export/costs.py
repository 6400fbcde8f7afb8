"""Measures size, time and memory of an export or of the student, each in a new process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from teachonce.downstream.process_memory import reset_peak, status_bytes
from teachonce.student_export.formats import Runner
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, out_of_memory
from teachonce.support.signals import stoppable

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

REPEATS = 5
Inputs = dict[str, Array]


@dataclass(frozen=True)
class Costs:
    """Holds the costs of a model on one thread of a CPU.

    bytes: size of its weights on disk.
    load_s: seconds from loading to the first output.
    sentence_ms: milliseconds for one text alone.
    per_second: texts per second in batches.
    memory: growth of the process in bytes after its libraries were imported; None if the system
        does not report it.

    All but `bytes` are None if no installed package can run the file.
    """

    bytes: int
    load_s: float | None = None
    sentence_ms: float | None = None
    per_second: float | None = None
    memory: int | None = None


def costs_of(
    format: str | None, path: Path, output: str, singles: Sequence[Inputs], batch: Inputs
) -> Costs:
    """Measure an exported file, or the student in the folder `path` if `format` is None.

    singles: inputs of one text each; batch: inputs of several texts. Raises UserError if the
    measuring process is killed, and any error that it raises.
    """
    # spawned, not forked: memory of this process is neither shared nor counted
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (format, path, output, list(singles), batch)
    process = context.Process(target=_send_measured, args=(sender, *arguments))
    with receiver, stoppable() as stop:
        try:
            with sender, stop.deferred():  # a stop here would leave an unknown process
                process.start()
            stop.check()
            result = receiver.recv()
        except EOFError:
            process.join()
            raise UserError(f"{path}: {_ended(process.exitcode or 0)}") from None
        finally:
            if process.pid is not None:
                process.kill()  # after a stop it may still work for seconds
                process.join()
    if isinstance(result, Exception):
        raise result
    return Costs(export_size(path), *result)


def _ended(code: int) -> str:
    """Describe how the measuring process ended without figures, and what to do next."""
    name = "the process that measures its time and memory"
    if code == -signal.SIGKILL:
        return (
            f"{name} was killed, perhaps because memory ran out; free some memory, and run the same"
            " command again"
        )
    if code < 0:
        return (
            f"{name} crashed ({signal.strsignal(-code)}); update the library that runs the format,"
            " or export to another format"
        )
    return (
        f"{name} ended with exit code {code}, and its error is above; a script that calls `export`"
        " must be a file, and call it under `if __name__ == '__main__':`, because the process"
        " imports the script"
    )


def export_size(path: Path) -> int:
    """Return the size in bytes of a file with its companions of the same stem (OpenVINO's .xml and
    .bin), or of the weights in a folder."""
    if path.is_dir():
        # Not both: a folder may have the same weights in two formats.
        paths = [*path.rglob("*.safetensors")] or [*path.rglob("pytorch_model*.bin")]
    else:
        paths = [*path.parent.glob(f"{path.stem}.*")]
    return sum(file.stat().st_size for file in paths)


def _send_measured(sender: Connection, *arguments: Any) -> None:
    """Run as the main function of the process that measures."""
    # Ctrl-C reaches the parent as well, which then kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sender.send(_measured(*arguments))
    except Exception as error:
        if not isinstance(error, UserError) and not out_of_memory(error):
            raise  # multiprocessing prints the traceback
        sender.send(error)


def _measured(
    format: str | None, path: Path, output: str, singles: list[Inputs], batch: Inputs
) -> tuple[float, float, float, int | None]:
    # With two threads, a BiLSTM takes five times as long for a single sentence (RESULTS, "Sizes of
    # taggers").
    if format in (None, "torchscript"):
        import torch

        torch.set_num_threads(1)
    load = _loader(format, path, output)
    with suppress(OSError):  # else a peak during the imports would count
        reset_peak()
    before = _memory("VmRSS")
    begin = time.perf_counter()
    run = load()
    run(singles[0])
    loaded = time.perf_counter() - begin
    run(batch)  # warms up
    alone, together = [], []
    for _ in range(REPEATS):
        together.append(_timed(run, [batch]))
        alone.append(_timed(run, singles) / len(singles))
    rows = len(next(iter(batch.values())))
    after = _memory("VmHWM")
    memory = None if before is None or after is None else after - before
    return loaded, 1000 * median(alone), rows / median(together), memory


def _loader(format: str | None, path: Path, output: str) -> Callable[[], Runner]:
    """Import the libraries of a format, and return a function that loads the model and returns its
    `Runner`."""
    if format is None:
        from teachonce.student_export.loaded_student import load_student

        return lambda: load_student(path).run
    from teachonce.student_export.formats.registry import FORMATS

    import_module(FORMATS[format].runner[0])
    return lambda: FORMATS[format].open(path, output, 1)


def _timed(run: Runner, inputs: Sequence[Inputs]) -> float:
    begin = time.perf_counter()
    for batch in inputs:
        run(batch)
    return time.perf_counter() - begin


def _memory(name: str) -> int | None:
    """Return a memory figure of this process in bytes; None on a system without /proc."""
    try:
        return status_bytes(name)
    except OSError:
        return None
