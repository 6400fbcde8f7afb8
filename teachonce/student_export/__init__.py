"""Exports a student to ONNX, OpenVINO or TorchScript and compares each file with the student."""
