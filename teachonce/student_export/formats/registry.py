"""The formats by their names."""

from __future__ import annotations

from teachonce.student_export.formats import Format, onnx, openvino, torchscript

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
