"""A few of the kills of the benchmark, and a small measurement."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.common.results import table
from benchmarks.reliability import jobs
from benchmarks.sharing import FAST, KILLED, Crew, seconds_of


def test_killed_while_others_go_on_and_timed() -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        job = jobs(Path(name))[0]
        job.undisturbed()
        crew = Crew(job, 2)
        row = crew.row(3, seed=1)
        assert row[1] == 3 == crew.struck.total() and row[4] == row[5]
        assert f"| {row[0]} | 3 |" in table(KILLED, [row])
        words = dict(zip(job.words[1::2], job.words[2::2], strict=True))
        taken = seconds_of(Path(name), str(words["--model"]), str(words["--corpus"]), 500, 2)
        assert taken > 0 and len(FAST) == 5
