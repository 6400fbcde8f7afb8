"""A few of the kills of the benchmark."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from benchmarks.common.results import table
from benchmarks.reliability import jobs
from benchmarks.sharing import Crew, RayCluster


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
