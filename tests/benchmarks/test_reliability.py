"""A few of the kills of the benchmark: each must be finished by the next start, and equal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.results import publish, table
from benchmarks.reliability import HEAD, Job, jobs

pytestmark = pytest.mark.apart  # a dump and a training are made first, undisturbed


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Job]]:
    """Return a folder in memory if the machine has one: fsync takes most of the time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield {job.name: job for job in jobs(Path(folder), texts=15)}


@pytest.mark.parametrize(
    ("name", "kills"), [("dump to .zarr", 12), ("dump to .h5", 12), ("training", 8)]
)
def test_killed_and_finished(made: dict[str, Job], tmp_path: Path, name: str, kills: int) -> None:
    job = made[name]
    if job.wanted is None:
        job.undisturbed()
    for seed in range(1, 5):  # on a loaded machine a kill may come after the end
        job.moments.clear()
        row = job.trials(kills, seed)
        if set(job.moments) & set(job.aimed):
            break
    assert row[0] == name and row[1] == row[3] == row[4] == kills == job.moments.total()
    assert set(job.moments) & set(job.aimed), job.moments
    publish("Never lose a dump", "small", table(HEAD, [row]), tmp_path / "RESULTS.md")
    assert f"| {name} | {kills} |" in (tmp_path / "RESULTS.md").read_text()


def test_a_difference_is_found(made: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = made["dump to .h5"]
    whole: Any = job.wanted
    monkeypatch.setattr(job, "wanted", (whole[0], whole[1][:-1]))
    with pytest.raises(RuntimeError, match="kill 1 has changed what it gives"):
        job.trials(1, seed=2)
