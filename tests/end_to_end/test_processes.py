"""A student trained by several processes is the student of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from student_train.settings.options import TrainOptions
from student_train.train.checks import check_ranks
from support.errors import UserError
from tests.end_to_end.support import ROOT, Words
from training.ranks import Ranks

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
STUDENT = (
    "--vocab", 400, "--student", "16x2x2", "--batch-tokens", 256, "--accumulate", 5, "--steps", 5,
    "--loss", "mlm=1,kl=1,hidden=1", "--dropout", 0.1, "--clip", 1000, "--eval-every", 2,
    "--device", "cpu", "--precision", "fp32",
)  # fmt: skip


def trained(processes: int, words: Words, **environment: Any) -> subprocess.CompletedProcess[str]:
    """Train by so many processes; the first gradient of each is beside the student."""
    out = words[words.index("--out") + 1]
    own = {"GRADIENTS": f"{out}.gradient", "OMP_NUM_THREADS": "1"}
    command = TORCHRUN + (str(processes),) if processes > 1 else (sys.executable,)
    return subprocess.run(
        [*command, "-m", "tests.end_to_end.watched", *map(str, words)],
        cwd=ROOT, env=os.environ | own | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "student"
    found = trained(1, ("--store", store, *STUDENT, "--out", out))
    assert found.returncode == 0, found.stderr
    return out


def same_curve(one: Path, other: Path) -> None:
    for here, there in zip(curve(one), curve(other), strict=True):
        assert here == pytest.approx(there, rel=1e-4)


@pytest.mark.parametrize("processes", [2, 3])
def test_gradients_and_losses_are_those_of_one_process(
    store: Path, alone: Path, tmp_path: Path, processes: int
) -> None:
    out = tmp_path / "student"
    found = trained(processes, ("--store", store, *STUDENT, "--out", out))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("store ") == 1 and f"processes {processes}" in found.stdout
    wanted = torch.load(f"{alone}.gradient.0")
    first, *others = (torch.load(f"{out}.gradient.{rank}") for rank in range(processes))
    for each in others:
        torch.testing.assert_close(each, first, rtol=0, atol=0)
    whole, got = (torch.cat([each.flatten() for each in some]) for some in (wanted, first))
    assert float((whole - got).norm() / whole.norm()) < 1e-6
    same_curve(out, alone)
    report = json.loads((out / "training.json").read_text())
    assert report["environments"][0]["processes"] == processes
    tokens = json.loads((alone / "training.json").read_text())["result"]["tokens"]
    assert report["result"]["tokens"] == tokens


def test_a_stop_of_one_stops_all_and_another_number_goes_on(
    store: Path, alone: Path, tmp_path: Path
) -> None:
    words = ("--store", store, *STUDENT, "--out", tmp_path / "student")
    stopped = trained(2, words, STOPPED="1")
    assert stopped.returncode != 0
    saved = [path.name for path in (tmp_path / "student/checkpoints").iterdir()]
    assert any("3" in name for name in saved), saved
    again = trained(3, (*words, "--resume"))
    assert again.returncode == 0, again.stderr
    assert "resume    after step 3" in again.stdout and "processes was 2 and is 3" in again.stdout
    same_curve(tmp_path / "student", alone)


def test_more_processes_than_batches_are_refused(store: Path) -> None:
    options = TrainOptions(store=str(store), accumulate=2)
    check_ranks(options, Ranks(0, 2))
    with pytest.raises(UserError, match="--accumulate 2 and 3 processes: a step has too few"):
        check_ranks(options, Ranks(0, 3))
