"""The students of a sweep on a Ray cluster, of which any process may die."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.processes import command, finish, fork
from teachonce.student_train.sweep.on_ray import Mailbox
from tests.end_to_end.support import STUDENT, Words, says
from tests.end_to_end.test_stopping import wait_for
from tests.end_to_end.test_sweeps import states

RATES = (0.01, 0.003, 1e-6)


def test_what_workers_ask_is_answered_to_them_alone() -> None:
    mailbox, answers = Mailbox(), dict[int, str]()

    def ask(number: int) -> None:
        answers[number] = mailbox.validated((number, 1), 10, {"valid_loss": 2.0})

    asking = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for each in asking:
        each.start()
    heard: list[Any] = []

    def hear() -> bool:
        heard.extend(mailbox.reports())
        return len(heard) == 2

    wait_for(hear, 10)
    assert sorted(heard)[0] == ((1, 1), "validated", 10, {"valid_loss": 2.0})
    mailbox.answer((2, 1), "worse")
    asking[1].join()
    assert answers == {2: "worse"}
    mailbox.answer((1, 1), "")
    asking[0].join()
    mailbox.say((1, 1), "a line")
    assert mailbox.reports() == [((1, 1), "say", "a line")] and mailbox.reports() == []
    assert answers == {1: "", 2: "worse"}


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def words_of(store: Path, out: Path, address: str, steps: int) -> Words:
    rates = [word for rate in RATES for word in ("--lr", rate)]
    return (
        *("--store", store, *STUDENT, "--vocab", 450, "--loss", "mlm", "--steps", steps, *rates),
        *("--eval-every", steps // 10, "--device", "cpu", "--out", out, "--ray", address),
    )


def writer(out: Path) -> int:
    """Return the process id that now trains a student, or 0."""
    for lease in out.glob(".*.lease"):
        if (student := out / lease.name[1:-6]).is_dir() and list(student.glob("checkpoints/*.pt")):
            return int(json.loads(lease.read_text())["pid"])
    return 0


@pytest.mark.apart
def test_a_sweep_of_which_anything_may_die(store: Path, tmp_path: Path, cluster: Any) -> None:
    """A worker and the driver are killed, a node joins; ASHA ends the worst student."""
    out, log = tmp_path / "out", tmp_path / "log"
    words = words_of(store, out, cluster.address, 400)
    more = ("--prune", "asha")
    driver = fork(command, "teachonce.student_train.sweep", *words, *more, log=log)
    wait_for(lambda: writer(out) or not driver.is_alive(), 300)
    os.kill(writer(out), signal.SIGKILL)
    wait_for(lambda: "another worker resumes the run" in log.read_text(), 300)
    wait_for(lambda: writer(out) or not driver.is_alive(), 300)
    driver.kill()
    assert finish(driver) == -signal.SIGKILL, log.read_text()
    cluster.add_node(num_cpus=1)
    driver = fork(command, "teachonce.student_train.sweep", *words, *more, log=log)
    assert finish(driver, 600) == 0, log.read_text()
    assert states(out)[2] == "pruned" and "finished" in states(out)
    said = log.read_text()
    says(said, "ray: 1 node with 1 place", "ray: 2 nodes with 2 places", "its worker died")
    assert re.search(r"resume    after step \d+", said), said
    assert "Traceback" not in said
    rows = json.loads((out / "sweep.json").read_text())
    assert {row["steps"] for row in rows} == {400}


@pytest.mark.apart
def test_a_stop_saves_the_students(store: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    words = words_of(store, out, "local", 2000)
    driver = fork(command, "teachonce.student_train.sweep", *words, log=log)
    wait_for(lambda: writer(out) or not driver.is_alive(), 300)
    os.kill(driver.pid or 0, signal.SIGINT)
    assert finish(driver) == 130, log.read_text()
    says(log.read_text(), "all students are saved; continue with the same command")
    assert "failed" not in states(out) and "Traceback" not in log.read_text()
    assert list(out.glob("*/checkpoints/*.pt"))
