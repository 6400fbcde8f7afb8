"""Measures mean and deviation of every channel: hidden states are encoded relative to them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from teachonce.store import StoreWriter
from teachonce.support.arrays import Array
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.forward import forward
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.teacher_dump.windows.window import Window, length_batches

CALIBRATION_TOKENS = 1 << 14


def calibration(
    options: DumpOptions, teacher: Teacher, windows: list[Window]
) -> dict[str, tuple[Array, Array]]:
    """Read the calibration of an unfinished store; where it lacks one, make it from the first
    windows."""
    if not teacher.hidden.groups:
        return {}
    kept = StoreWriter.calibration(options.out) if StoreWriter.peek(options.out) else None
    return kept or _calibrate(teacher, windows, options.batch_tokens)


def _calibrate(
    teacher: Teacher, windows: list[Window], batch_tokens: int
) -> dict[str, tuple[Array, Array]]:
    """Measure mean and deviation [D] over windows spread evenly through the first part."""
    step = max(1, sum(len(w.ids) for w in windows) // CALIBRATION_TOKENS)
    inputs = [w.ids for w in windows]
    chosen = np.arange(0, len(windows), step)
    batches = length_batches([len(inputs[i]) for i in chosen], batch_tokens)
    states: dict[str, list[Array]] = {name: [] for name in teacher.hidden.groups}
    for known in forward(teacher, windows, inputs, [chosen[b] for b in batches], 0, Counter()):
        for name, values in known.hidden.items():
            states[name].append(values)
    return {name: mean_and_deviation(parts) for name, parts in states.items()}


def mean_and_deviation(parts: list[Array]) -> tuple[Array, Array]:
    """Measure mean and deviation [D] of states [n,D]; a channel that never changes has 1."""
    joined = np.concatenate(parts).astype(np.float64)
    deviation = joined.std(axis=0)
    deviation[deviation == 0] = 1.0
    return joined.mean(axis=0).astype(np.float32), deviation.astype(np.float32)
