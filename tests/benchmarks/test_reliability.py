"""A few of the kills of the benchmarks, and the table of the checks of integrity.

- A few of the kills of the benchmark: each must be finished by the next start, and equal.
- A few of the kills of the benchmark.
- The benchmark of integrity runs the checks in a separate process and writes their table.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import integrity
from benchmarks.common.results import publish, table
from benchmarks.reliability import HEAD, Job, jobs
from benchmarks.sharing import Crew, RayCluster
from tests.end_to_end.support import ok


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Job]]:
    """Return a folder in memory if the machine has one: fsync takes most of the time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield {job.name: job for job in jobs(Path(folder), texts=15)}


@pytest.mark.apart  # a dump and a training are made first, undisturbed
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


@pytest.mark.apart
def test_a_difference_is_found(made: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = made["dump to .h5"]
    whole: Any = job.wanted
    monkeypatch.setattr(job, "wanted", (whole[0], whole[1][:-1]))
    with pytest.raises(RuntimeError, match="kill 1 has changed what it gives"):
        job.trials(1, seed=2)


@pytest.mark.apart
@pytest.mark.parametrize("kills", [1, 6])
def test_killed_while_others_go_on(kills: int) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        job = jobs(Path(name), texts=15)[0]
        job.undisturbed()
        crew = Crew(job, 2)
        row = crew.row(kills, seed=1)
        assert row[1] == kills == crew.struck.total() and row[4] == row[5]
        assert f"| {row[0]} | {kills} |" in table(Crew.head(), [row])


@pytest.mark.apart
def test_a_siege_of_a_cluster_ends_in_the_undisturbed_store(tmp_path: Path) -> None:
    job = jobs(tmp_path, 100)[0]
    job.undisturbed()
    name, killed, *struck, stores, equal = RayCluster(job, 2).row(2, seed=0)
    assert "2 nodes" in str(name) and killed == 2 == sum(map(int, map(str, struck)))
    assert stores == equal


@pytest.mark.slow
def test_the_benchmark_publishes_what_the_checks_find(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    ok(integrity.main, "forged", "--hdf5", 2, "--zarr", 0, "--results", results)
    text = results.read_text()
    assert "## Forged stores\n" in text and "| 2 HDF5 |" in text
    assert "`python -m benchmarks.integrity forged --hdf5 2 --zarr 0`; seed 0." in text
