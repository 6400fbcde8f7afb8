"""The formats by their names."""

from __future__ import annotations

from teachonce.student_export.formats import onnx, openvino, torchscript
from teachonce.student_export.formats.interface import Format

FORMATS = {
    "onnx": Format(onnx.NAMES, onnx.write_float, onnx.open_run, onnx.layers, onnx.quantised),
    "openvino": Format(
        openvino.NAMES,
        openvino.write_float,
        openvino.open_run,
        openvino.layers,
        openvino.quantised,
    ),
    "torchscript": Format(torchscript.NAMES, torchscript.write_float, torchscript.open_run),
}
