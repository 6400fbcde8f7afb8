"""Measures size, time and memory of an export or of the student, each in a new process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from teachonce.downstream.process_memory import reset_peak, status_bytes
from teachonce.student_export.formats import Runner
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

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

    singles: inputs of one text each; batch: inputs of several texts.
    """
    # spawned, so that what this process has loaded is neither shared nor counted
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(_measured, format, path, output, list(singles), batch).result()
    except BrokenProcessPool:
        raise UserError(
            f"{path}: the process that measures its time and memory was killed, perhaps because"
            " memory ran out; free some memory, and run the same command again"
        ) from None
    return Costs(size_of(path), *found)


def size_of(path: Path) -> int:
    """Return the bytes of a file with its companions of the same stem (OpenVINO's .xml and .bin),
    or of the weights in a folder."""
    if path.is_dir():
        # Not both: a folder may have the same weights in two formats.
        found = [*path.rglob("*.safetensors")] or [*path.rglob("pytorch_model*.bin")]
    else:
        found = [*path.parent.glob(f"{path.stem}.*")]
    return sum(each.stat().st_size for each in found)


def _measured(
    format: str | None, path: Path, output: str, singles: list[Inputs], batch: Inputs
) -> tuple[float, float, float, int | None]:
    # With two threads, a BiLSTM takes five times as long for a single sentence (RESULTS, "Sizes of
    # taggers").
    if format in (None, "torchscript"):
        import torch

        torch.set_num_threads(1)
    load = _loader(format, path, output)
    with suppress(OSError):  # so that a peak of the imports is not the model's
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
    """Import the libraries of a format, and return the function that loads the model."""
    if format is None:
        from teachonce.student_export.loaded_student import load_student

        return lambda: load_student(path).run
    from teachonce.student_export.formats.registry import FORMATS

    import_module(FORMATS[format].runner[0])
    return lambda: FORMATS[format].open(path, output, 1)


def _timed(run: Runner, inputs: Sequence[Inputs]) -> float:
    begin = time.perf_counter()
    for each in inputs:
        run(each)
    return time.perf_counter() - begin


def _memory(name: str) -> int | None:
    """Return a memory figure of this process in bytes; None on a system without /proc."""
    try:
        return status_bytes(name)
    except OSError:
        return None
