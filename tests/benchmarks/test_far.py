"""The benchmark of remote stores runs on a small store in this process."""

from pathlib import Path

import pytest

from benchmarks.reading import far
from benchmarks.reading.far import Bench, measure


def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(far, "alone", lambda work: work())
    monkeypatch.setattr(far, "STEPS", 1)
    bench = Bench(tmp_path, 3000, 16, 4, 5.0)
    assert bench.tokens > 2900
    monkeypatch.setattr(bench, "peers", {})  # measured in an environment of their own
    streams, students = measure(bench, [5.0], 1)
    near, _, none, empty, full = (line.split(" | ") for line in streams.splitlines()[2:])
    assert len(students.splitlines()) == 4
    assert near[3] == "100%" and float(near[8]) == 0
    requests = [float(row[8]) for row in (none, empty, full)]
    size = [float(row[9].strip(" |").replace(",", "")) for row in (none, empty, full)]
    # For a store on disk, only its root and its manifest are requested through the address.
    assert requests[0] == requests[1] > 5 * requests[2] > 0 and size[0] == size[1] > size[2]
