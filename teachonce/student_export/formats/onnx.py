"""ONNX: written by torch, quantised and run by onnxruntime; the layout of transformers.js."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.student_export.formats import Run
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, out_of_memory
from teachonce.support.extras import library

if TYPE_CHECKING:
    from teachonce.student_export.student import Student

NAMES = {"": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx", "int4": "onnx/model_q4.onnx"}
"""Files by quantisation, as transformers.js looks for them (dtype fp32, q8 and q4)."""
BLOCK = 32  # weights that share a scale in 4 bits
SCOPES = "pkg.torch.onnx.name_scopes"


def write_float(student: Student, path: Path) -> None:
    """Write the network in float32, for batches of any size and length.

    Raises UserError without the libraries, and for an operator that torch cannot export.
    """
    import torch

    for name in ("onnx", "onnxscript"):
        library(name, "export", "--to onnx")
    example = student.encode(["the old lamp of the tower", "light"])
    inputs = tuple(torch.as_tensor(example[name]) for name in student.inputs)
    recurrent = any(isinstance(each, torch.nn.LSTM) for each in student.network.modules())
    try:
        with _silence():
            # torch.export unrolls an LSTM; the older exporter has an operator for it, and for
            # attention masks of any length it writes numbers of the example.
            (_traced if recurrent else _exported)(student, inputs, path)
    except UserError:
        raise
    except Exception as error:  # torch raises errors of any kind, each with a page of text
        if out_of_memory(error):
            raise
        raise UserError(
            f"{student.folder}: torch cannot export it to ONNX: {_cause(error)}; export a student"
            " of another kind (student-train --student), or another format"
        ) from error


def _exported(student: Student, inputs: tuple[Any, ...], path: Path) -> None:
    import torch

    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    program: Any = torch.onnx.export(
        student.network,
        inputs,
        dynamo=True,
        input_names=list(student.inputs),
        output_names=[student.output],
        dynamic_shapes=tuple(dims for _ in inputs),
        verbose=False,
    )
    _without_traces(program.model_proto, path)


def _without_traces(model: Any, path: Path) -> None:
    """Save a model without the exporter's notes on each node but the layer that it is of: traces
    name paths of this machine, and take more bytes than the weights of a small student."""
    for node in model.graph.node:
        scopes = [each.value for each in node.metadata_props if each.key == SCOPES]
        del node.metadata_props[:]
        if scopes:
            node.metadata_props.add(key=SCOPES, value=scopes[0])
    library("onnx", "export", "--to onnx").save(model, str(path))


def _traced(student: Student, inputs: tuple[Any, ...], path: Path) -> None:
    import torch

    torch.onnx.export(
        student.network,
        inputs,
        str(path),
        dynamo=False,
        input_names=list(student.inputs),
        output_names=[student.output],
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in student.inputs},
        opset_version=18,
    )


def open_run(path: Path, output: str, threads: int = 1) -> Run:
    """Load a file. Raises UserError without onnxruntime, and for a file that it cannot run."""
    ort = library("onnxruntime", "export", "--to onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(f"{path.name}: onnxruntime cannot run it: {_cause(error)}") from error

    def run(inputs: dict[str, Array]) -> Array:
        found: Array = session.run([output], inputs)[0]
        return found

    return run


def layers(path: Path) -> dict[str, list[str]]:
    """Find what can be quantised: names of nodes by the layer of the student that they are of."""
    onnx = library("onnx", "export", "--quantize")
    graph = onnx.load(str(path)).graph
    constant = {each.name for each in graph.initializer}
    found: dict[str, list[str]] = {}
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm", "Gather", "LSTM") and constant & set(node.input[:3]):
            large = {each.name: len(each.dims) for each in graph.initializer}
            if max(large.get(name, 0) for name in node.input) >= 2:
                found.setdefault(_layer(node), []).append(node.name)
    return found


def _layer(node: Any) -> str:
    """Name the layer of the student that a node is of, by what the exporter says of its origin."""
    name = str(node.name)
    scopes = "".join(str(each.value) for each in node.metadata_props if each.key == SCOPES)
    if scopes:
        parts = [part.strip(" '\"") for part in scopes.strip("[]").split(",")]
        return next((part for part in reversed(parts[:-1]) if part), name)
    return name.strip("/").rpartition("/")[0].replace("/", ".") or name


def quantised(source: Path, path: Path, kind: str, nodes: Sequence[str]) -> None:
    """Write `source` with the weights of some `nodes` in int8 (their inputs, too, as they come) or
    int4 (blocks of BLOCK weights)."""
    library("onnxruntime", "export", "--quantize")
    with _silence():
        if kind == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic

            # A scale for each channel: one for a whole matrix loses a tenth of MiniLM's cosines.
            quantize_dynamic(
                str(source),
                str(path),
                weight_type=QuantType.QInt8,
                per_channel=True,
                nodes_to_quantize=list(nodes),
            )
            return
        _in_four_bits(source, path, nodes)


def _in_four_bits(source: Path, path: Path, nodes: Iterable[str]) -> None:
    onnx = library("onnx", "export", "--quantize")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(str(source))
    kept = [node.name for node in model.graph.node if node.name not in set(nodes)]
    found = MatMulNBitsQuantizer(
        model,
        bits=4,
        block_size=BLOCK,
        is_symmetric=False,
        nodes_to_exclude=kept,
        op_types_to_quantize=("MatMul", "Gather"),
    )
    found.process()
    found.model.save_model_to_file(str(path), False)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporters' warnings of their own parts to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _cause(error: BaseException) -> str:
    """The first line of what an error of an exporter was raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
