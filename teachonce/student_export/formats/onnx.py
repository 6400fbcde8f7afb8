"""ONNX: exported by torch, quantised and run by onnxruntime, in the layout of transformers.js."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from teachonce.student_export.formats import Runner, onnx_decoder
from teachonce.student_export.formats.onnx_decoder import PAST
from teachonce.student_export.options import DECODER
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError, out_of_memory
from teachonce.support.packages import library

if TYPE_CHECKING:
    from teachonce.student_export.loaded_student import LoadedStudent

NAMES = {"": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx", "int4": "onnx/model_q4.onnx"}
"""Paths by quantisation, where transformers.js looks for them (dtype fp32, q8 and q4)."""
BLOCK = 32  # weights that share a scale in 4 bits
SCOPES = "pkg.torch.onnx.name_scopes"


def write_float(student: LoadedStudent, path: Path) -> None:
    """Export the network in float32, for batches of any size and length.

    Raises UserError if a library is missing, or torch cannot export an operator.
    """
    import torch

    for name in ("onnx", "onnxscript"):
        library(name, "export", "--to onnx")
    if student.kind == DECODER:
        with _torch_errors(student.folder), _silence():
            _exported(*onnx_decoder.traced(student.network.network), path)
        return
    # Two texts, because torch.export takes a size of 1 for a constant, with different lengths, so
    # that one is padded.
    example = student.encode(["the old lamp of the tower", "light"])
    inputs = tuple(torch.as_tensor(example[name]) for name in student.inputs)
    recurrent = any(isinstance(module, torch.nn.LSTM) for module in student.network.modules())
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    names = {
        "input_names": list(student.inputs),
        "output_names": list(student.outputs),
        "dynamic_shapes": tuple(dims for _ in inputs),
    }
    with _torch_errors(student.folder), _silence():
        # torch.export unrolls an LSTM, the TorchScript exporter writes an LSTM operator. But
        # for attention masks, the TorchScript exporter hard-codes the example's length.
        if recurrent:
            _traced(student, inputs, path)
        else:
            _exported(student.network, inputs, names, path)


@contextmanager
def _torch_errors(folder: Path) -> Iterator[None]:
    """Raise errors of torch's exporters inside the `with` block as UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # torch raises errors of any kind, each with a page of text
        if out_of_memory(error):
            raise
        raise UserError(
            f"{folder}: torch cannot export it to ONNX: {_cause(error)}; export a student"
            " of another kind (student-train --student), or another format"
        ) from error


def _exported(network: Any, inputs: tuple[Any, ...], names: dict[str, Any], path: Path) -> None:
    import torch

    program: Any = torch.onnx.export(network, inputs, dynamo=True, verbose=False, **names)
    _save_without_traces(program.model_proto, path)


def _save_without_traces(model: Any, path: Path) -> None:
    """Save a model; of the exporter's metadata of each node, only the module scope is saved."""
    # Stack traces name paths of this machine, and are larger than the weights of a small student.
    for node in model.graph.node:
        scopes = [prop.value for prop in node.metadata_props if prop.key == SCOPES]
        del node.metadata_props[:]
        if scopes:
            node.metadata_props.add(key=SCOPES, value=scopes[0])
    library("onnx", "export", "--to onnx").save(model, str(path))


def _traced(student: LoadedStudent, inputs: tuple[Any, ...], path: Path) -> None:
    import torch

    torch.onnx.export(
        student.network,
        inputs,
        str(path),
        dynamo=False,
        input_names=list(student.inputs),
        output_names=list(student.outputs),
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in student.inputs},
        opset_version=18,
    )


def open_runner(path: Path, output: str, threads: int = 1) -> Runner:
    """Load a file, and return the function that runs it on the CPU. Raises UserError if onnxruntime
    is missing, or cannot load the file."""
    ort = library("onnxruntime", "export", "--to onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UserError(
            f"{path}: onnxruntime cannot load it ({_cause(error)}); copy the whole folder again, or"
            " export the student again"
        ) from error

    past = {node.name: node.shape for node in session.get_inputs() if PAST in node.name}

    def run(inputs: dict[str, Array]) -> Array:
        texts = len(inputs["input_ids"])
        # A decoder's export has its cache among its inputs; before the first call the cache is
        # empty.
        empty = {name: np.zeros((texts, s[1], 0, s[3]), np.float32) for name, s in past.items()}
        result: Array = session.run([output], inputs | empty)[0]
        return result

    return run


def layers(path: Path) -> dict[str, list[str]]:
    """Return the names of the nodes with weights in float32, by layer of the student."""
    onnx = library("onnx", "export", "--quantize")
    graph = onnx.load(str(path)).graph
    constant = {init.name for init in graph.initializer if init.data_type == onnx.TensorProto.FLOAT}
    dims = {init.name: len(init.dims) for init in graph.initializer}
    names: dict[str, list[str]] = {}
    for node in graph.node:
        weighted = node.op_type in ("MatMul", "Gemm", "Gather", "LSTM")
        # Constants of one dimension, such as biases, are not quantised.
        large = weighted and max(dims.get(name, 0) for name in node.input) >= 2
        if large and constant & set(node.input[:3]):
            names.setdefault(_layer(node), []).append(node.name)
    return names


def _layer(node: Any) -> str:
    """Return the name of the student's layer that a node was exported from."""
    name = str(node.name)
    scopes = "".join(str(prop.value) for prop in node.metadata_props if prop.key == SCOPES)
    if scopes:
        parts = [part.strip(" '\"") for part in scopes.strip("[]").split(",")]
        # The scopes are the modules from the network to the node; the last one is the node itself.
        return next((part for part in reversed(parts[:-1]) if part), name)
    return name.strip("/").rpartition("/")[0].replace("/", ".") or name


def quantise(source: Path, path: Path, kind: str, nodes: Sequence[str]) -> list[str]:
    """Write `source` with the weights of `nodes` in int8 or int4; return the nodes that stay in
    float32, as LSTMs do in int4.

    int8 is dynamic: activations are quantised at run time. int4 has a scale for BLOCK weights.
    """
    library("onnxruntime", "export", "--quantize")
    with _silence():
        if kind == "int8":
            from onnxruntime.quantization import QuantType, quantize_dynamic

            # One scale for each channel: with one for each matrix, the cosines of MiniLM's vectors
            # fall by a tenth.
            quantize_dynamic(
                str(source),
                str(path),
                weight_type=QuantType.QInt8,
                per_channel=True,
                nodes_to_quantize=list(nodes),
            )
        else:
            _in_four_bits(source, path, nodes)
    # Read from the written file, because the operators that onnxruntime quantises depend on its
    # release.
    remaining = {name for names in layers(path).values() for name in names}
    return [name for name in nodes if name in remaining]


def _in_four_bits(source: Path, path: Path, nodes: Iterable[str]) -> None:
    onnx = library("onnx", "export", "--quantize")
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model, quantised = onnx.load(str(source)), set(nodes)
    excluded = [node.name for node in model.graph.node if node.name not in quantised]
    quantizer = MatMulNBitsQuantizer(
        model,
        bits=4,
        block_size=BLOCK,
        is_symmetric=False,
        nodes_to_exclude=excluded,
        op_types_to_quantize=("MatMul", "Gather"),
    )
    quantizer.process()
    # False: no external data, so that the export is one file.
    quantizer.model.save_model_to_file(str(path), False)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the exporters' warnings, which are about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _cause(error: BaseException) -> str:
    """Return the first line of an exporter's original error."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
