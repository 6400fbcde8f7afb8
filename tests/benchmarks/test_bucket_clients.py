"""The clients of buckets are measured side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_row_for_each_client_and_size() -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("s3fs")
    words = [sys.executable, "-m", "benchmarks.bucket_clients", "--count", "8"]
    told = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    rows = [line.split(" | ")[:2] for line in told.splitlines()[3:]]
    pairs = [("obstore", "16 KiB"), ("s3fs", "16 KiB"), ("obstore", "1 MiB"), ("s3fs", "1 MiB")]
    assert rows == [[f"| {client}", size] for client, size in pairs]
