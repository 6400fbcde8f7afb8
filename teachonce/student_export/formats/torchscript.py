"""TorchScript: traced by torch, for libtorch and C++ programs."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from teachonce.student_export.formats import Runner
from teachonce.support.arrays import Array

NAMES = {"": "torchscript/model.pt"}


def write_float(student: Any, path: Path) -> None:
    """Trace the network with a small batch, and save it."""
    import torch

    example = student.encode(["the old lamp of the tower", "light"])
    inputs = tuple(torch.as_tensor(example[name]) for name in student.inputs)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Without the tracer's own check: every export is compared with the student afterwards.
        network = torch.jit.trace(student.network, inputs, check_trace=False)
        # To memory first: on a full disk torch's own writer ends the process.
        torch.jit.save(network, buffer := io.BytesIO())
    path.write_bytes(buffer.getbuffer())


def open_runner(path: Path, output: str, threads: int = 1) -> Runner:
    """Load a file. Its inputs are in the order of `loaded_student.INPUTS`."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = torch.jit.load(str(path))

    def run(inputs: dict[str, Array]) -> Array:
        with torch.inference_mode():
            result = network(*map(torch.as_tensor, inputs.values()))
        answer: Array = (result[0] if isinstance(result, tuple) else result).numpy()
        return answer

    return run
