"""Exports a student to ONNX, OpenVINO, TorchScript, GGUF or model2vec, and compares each file with
the student."""
