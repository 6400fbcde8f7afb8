"""Exports a student to ONNX, OpenVINO, TorchScript or GGUF, and compares each file with it."""
