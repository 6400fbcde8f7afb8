"""The formats of exports by name."""

from __future__ import annotations

from teachonce.student_export.formats import ExportFormat, onnx, openvino, torchscript

FORMATS = {
    "onnx": ExportFormat(
        onnx.NAMES, onnx.write_float, onnx.open_runner, onnx.layers, onnx.quantise
    ),
    "openvino": ExportFormat(
        openvino.NAMES,
        openvino.write_float,
        openvino.open_runner,
        openvino.layers,
        openvino.quantise,
    ),
    "torchscript": ExportFormat(
        torchscript.NAMES, torchscript.write_float, torchscript.open_runner
    ),
}
