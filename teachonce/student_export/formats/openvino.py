"""OpenVINO: converted from ONNX, quantised by NNCF."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teachonce.student_export.formats import Runner, onnx
from teachonce.support.arrays import Array
from teachonce.support.packages import library

NAMES = {
    "": "openvino/openvino_model.xml",
    "int8": "openvino/openvino_model_qint8_quantized.xml",
}
"""Paths by quantisation, under the names of sentence-transformers and optimum."""
EXTRA = "openvino"


def write_float(student: Any, path: Path) -> None:
    """Export the network in float32. Raises UserError as `onnx.write_float` does."""
    openvino = library("openvino", EXTRA, "--to openvino")
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        source = Path(scratch) / "model.onnx"
        onnx.write_float(student, source)
        # By default OpenVINO rounds weights to float16 when it saves.
        openvino.save_model(openvino.convert_model(source), path, compress_to_fp16=False)


def open_runner(path: Path, output: str, threads: int = 1) -> Runner:
    """Load a file. Raises UserError if openvino is missing."""
    openvino = library("openvino", EXTRA, "--to openvino")
    # By default a processor with bfloat16 computes in it.
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(str(path), "CPU", settings)

    def run(inputs: dict[str, Array]) -> Array:
        # The outputs of a call are memory that the next call overwrites.
        result: Array = model(inputs)[output].copy()
        return result

    return run


def layers(path: Path) -> dict[str, list[str]]:
    """Return the operators that NNCF can compress, each as a layer of its own."""
    openvino = library("openvino", EXTRA, "--quantize")
    model = openvino.Core().read_model(str(path))
    kinds = ("MatMul", "Gather", "LSTMSequence")
    names = [op.get_friendly_name() for op in model.get_ops() if op.get_type_name() in kinds]
    return {name: [name] for name in names}


def quantise(source: Path, path: Path, kind: str, nodes: Sequence[str]) -> Sequence[str]:
    """Write `source` with the weights of the operators `nodes` in int8, one scale per channel."""
    openvino = library("openvino", EXTRA, "--quantize")
    nncf = library("nncf", EXTRA, "--quantize with --to openvino")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    ignored = [name for name in layers(source) if name not in nodes]
    model = nncf.compress_weights(
        openvino.Core().read_model(str(source)),
        mode=nncf.CompressWeightsMode.INT8_ASYM,
        ignored_scope=nncf.IgnoredScope(names=ignored) if ignored else None,
    )
    openvino.save_model(model, path, compress_to_fp16=False)
    return ()
