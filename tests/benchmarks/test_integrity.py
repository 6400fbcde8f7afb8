"""The benchmark of integrity runs the checks in a separate process and writes their table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import integrity
from tests.end_to_end.support import ok


@pytest.mark.slow
def test_the_benchmark_publishes_what_the_checks_find(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    ok(integrity.main, "forged", "--hdf5", 2, "--zarr", 0, "--results", results)
    text = results.read_text()
    assert "## Forged stores\n" in text and "| 2 HDF5 |" in text
    assert "`python -m benchmarks.integrity forged --hdf5 2 --zarr 0`; seed 0." in text
