"""Measures size, time and memory of an export and of the student itself, each in a new process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from teachonce.downstream.process_memory import status_bytes
from teachonce.student_export.formats import Run
from teachonce.support.arrays import Array

REPEATS = 5
Inputs = dict[str, Array]


@dataclass(frozen=True)
class Figures:
    """What a model costs on one thread of a CPU.

    bytes: of its weights on disk. load_s: seconds until it can be asked. sentence_ms: of one text.
    per_second: texts of a batch. memory: bytes by which the process grows beyond its libraries,
    None where the system does not tell.
    """

    bytes: int
    load_s: float
    sentence_ms: float
    per_second: float
    memory: int | None


def figures_of(
    format: str | None, path: Path, output: str, singles: Sequence[Inputs], batch: Inputs
) -> Figures:
    """Measure a file of an export, or for None the student in a folder.

    singles: texts alone; batch: texts at once.
    """
    # spawned, so that what this process has loaded is neither shared nor counted
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(_measured, format, path, output, list(singles), batch).result()
    return Figures(size_of(path), *found)


def size_of(path: Path) -> int:
    """The bytes of a file and of those that are called as it, or of all weights of a folder."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*.safetensors"))
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.stem}.*"))


def _measured(
    format: str | None, path: Path, output: str, singles: list[Inputs], batch: Inputs
) -> tuple[float, float, float, int | None]:
    load = _loader(format, path, output)
    before = _memory("VmRSS")
    begin = time.perf_counter()
    run = load()
    run(singles[0])
    loaded = time.perf_counter() - begin
    run(batch)
    alone, together = [], []
    for _ in range(REPEATS):
        together.append(_timed(run, [batch]))
        alone.append(_timed(run, singles) / len(singles))
    rows = len(next(iter(batch.values())))
    after = _memory("VmHWM")
    memory = None if before is None or after is None else after - before
    return loaded, 1000 * median(alone), rows / median(together), memory


def _loader(format: str | None, path: Path, output: str) -> Callable[[], Run]:
    """Import what a model needs, and make the function that loads it."""
    if format is None:
        import torch

        from teachonce.student_export.student import load_student

        torch.set_num_threads(1)
        return lambda: load_student(path).run
    from teachonce.student_export.formats.registry import FORMATS

    libraries: dict[str, Any] = {"onnx": "onnxruntime", "openvino": "openvino"}
    import_module(libraries.get(format, "torch"))
    return lambda: FORMATS[format].open(path, output, 1)


def _timed(run: Run, inputs: Sequence[Inputs]) -> float:
    begin = time.perf_counter()
    for each in inputs:
        run(each)
    return time.perf_counter() - begin


def _memory(name: str) -> int | None:
    """A figure of this process, in bytes; None where the system does not keep it."""
    try:
        return status_bytes(name)
    except OSError:
        return None
