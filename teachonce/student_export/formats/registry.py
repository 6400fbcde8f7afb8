"""The formats of exports by name."""

from __future__ import annotations

from teachonce.student_export.formats import (
    ExportFormat,
    gguf,
    model2vec,
    onnx,
    onnx_decoder,
    openvino,
    torchscript,
)

FORMATS = {
    "onnx": ExportFormat(
        onnx.NAMES,
        onnx.write_float,
        onnx.open_runner,
        ("onnxruntime", "onnxruntime"),
        onnx.layers,
        onnx.quantise,
        usage=onnx_decoder.usage,
        per_batch=("int8",),
        layers_are_modules=True,
    ),
    "openvino": ExportFormat(
        openvino.NAMES,
        openvino.write_float,
        openvino.open_runner,
        ("openvino", "openvino"),
        openvino.layers,
        openvino.quantise,
    ),
    "torchscript": ExportFormat(
        torchscript.NAMES, torchscript.write_float, torchscript.open_runner, ("torch", "torch")
    ),
    "gguf": ExportFormat(
        gguf.NAMES,
        gguf.write_float,
        gguf.open_runner,
        (gguf.RUNNER, "llama-cpp-python"),
        gguf.layers,
        gguf.quantise,
        tokens=gguf.token_ids,
        usage=gguf.usage,
    ),
    "model2vec": ExportFormat(
        model2vec.NAMES,
        model2vec.write_float,
        model2vec.open_runner,
        ("numpy", "model2vec"),  # no package: `model2vec.open_runner` reads the table itself
        usage=model2vec.usage,
    ),
}
