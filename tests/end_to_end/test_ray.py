"""A Ray cluster makes the same store as a single process, and the students of a sweep.

- The workers of a Ray cluster make the same store as a single process.
- The students of a sweep on a Ray cluster, of which any process may die.
"""

import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.processes import PART_TOKENS, command, finish, fork, in_small_parts
from harness.ray_cluster import Ray
from harness.store_content import content_of_store
from teachonce.store import StoreWriter
from teachonce.store.write.part_queue import PartQueue
from teachonce.student_train.sweep.on_ray import Mailbox
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.ray_cluster import DriverNode, node_capacity
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.on_ray import WorkerJob, driver_path, share_on_ray, worker
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.sharing import ProcessSummary
from tests.end_to_end.support import STUDENT, Words, refused, says
from tests.end_to_end.test_resume import wait_for
from tests.end_to_end.test_sweeps import states
from tests.making.dumps import dump_options, write_corpus
from tests.support.leased import held


@pytest.fixture
def options(model: Path, tmp_path: Path) -> DumpOptions:
    corpus = write_corpus(tmp_path / "corpus.txt", 40)
    out = tmp_path / "made" / "store.zarr"
    out.parent.mkdir()
    return dump_options(model, corpus, out, part_tokens=PART_TOKENS, batch_tokens=256)


def words_of(options: DumpOptions, *more: str | int) -> tuple[str | Path | int, ...]:
    source, out = options.corpus[0], options.out
    words = ("--model", options.model, "--corpus", source, "--out", out, "--logits", "topk:8")
    return (*words, "--batch-tokens", 256, "--device", "cpu", "--precision", "fp32", *more)


def place(options: DumpOptions) -> Path:
    return Path(options.out)


def alone(options: DumpOptions) -> object:
    """Return the store of a single process."""
    out = place(options).parent.with_name("alone") / place(options).name
    out.parent.mkdir()
    single = replace(options, out=out)
    dump(single)
    return whole(single)


def whole(options: DumpOptions) -> object:
    place(options).with_name("log").touch()
    return content_of_store(place(options))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_bucket_has_no_queue(options: DumpOptions) -> None:
    with pytest.raises(UserError, match="a bucket has no folders"):
        replace(options, out="s3://bucket/store.zarr", ray="local")


def test_without_the_extra_the_command_that_installs_it_is_reported(options: DumpOptions) -> None:
    with mock.patch.dict(sys.modules, {"ray": None}):
        line = refused(teacher_dump, *words_of(options, "--ray"))
    says(line, "--ray needs ray", "pip install 'teachonce[ray]'")
    with pytest.raises(UserError, match="from Python call"):
        dump(replace(options, ray="local"))


def test_an_address_that_does_not_answer(options: DumpOptions) -> None:
    address = f"127.0.0.1:{free_port()}"
    line = refused(teacher_dump, *words_of(options, "--ray", address))
    says(line, f"--ray {address}: no cluster answers at this address", "ray start --head")
    assert os.listdir(place(options).parent) == []


def test_there_is_one_driver_at_a_time(options: DumpOptions) -> None:
    with held(driver_path(place(options))):
        line = refused(teacher_dump, *words_of(options, "--ray", "local"))
    says(line, "another `teacher-dump --ray` is writing it", "another process is writing it")


@pytest.fixture
def task(options: DumpOptions) -> Iterator[WorkerJob]:
    lease = Lease(driver_path(place(options)))
    yield WorkerJob(options, DriverNode.here(driver_path(place(options)), lease))
    lease.close()


def test_a_worker_with_other_software_or_another_disk_is_refused(
    task: WorkerJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(**changes: Any) -> str:
        options = changes.pop("options", task.options)
        home = replace(task.home, **{"driven": driver_path(place(options)), **changes})
        found = worker(WorkerJob(options, home), ProcessShard(0, 1))
        assert isinstance(found, str) and "\n" not in found
        return found

    monkeypatch.chdir(tmp_path)
    host = socket.gethostname()
    line = message(installed={**task.home.installed, "code": "abc"})
    says(line, f"{host}: code is ", "and abc on")
    says(message(installed={**task.home.installed, "torch": "1.0"}), "torch is ", "and 1.0 on")
    says(message(token="0123"), "on this node is not the same folder", "a disk that all nodes")
    elsewhere = replace(task.options, out=tmp_path / "another" / "store.zarr")
    says(message(options=elsewhere), "another on this node is not the same folder")
    says(message(folder=str(tmp_path / "not there")), "not there: No such file or directory")
    assert StoreWriter.peek(task.options.out) is None


def test_a_worker_with_another_corpus_or_a_wrong_clock(task: WorkerJob) -> None:
    """A clock that is an hour ahead has no effect, as silence is measured by the file system's
    clock. A worker with another corpus is refused."""
    now = time.time
    with mock.patch("time.time", lambda: now() + 3600):
        done = worker(task, ProcessShard(0, 1))
    assert isinstance(done, ProcessSummary) and done.store and done.parts == done.store.parts > 2
    corpus = Path(task.options.corpus[0])
    corpus.write_text(corpus.read_text() + "One more.\n")
    found = worker(task, ProcessShard(0, 1))
    assert isinstance(found, str)
    says(found, f"{socket.gethostname()}: ", "finished with other arguments", "bytes) is")


def test_places_of_a_node() -> None:
    node = {"CPU": 8.0, "GPU": 2.0, "memory": 1e9}
    places = {0: 8, 0.25: 8, 0.3: 6, 0.5: 4, 1: 2, 2: 1, 3: 0}
    assert {gpus: node_capacity(node, gpus) for gpus in places} == places
    assert node_capacity({"CPU": 2.0}, 0.5) == 0 and node_capacity({}, 0) == 0


@pytest.fixture
def ray(options: DumpOptions) -> Iterator[Ray]:
    words = ("teachonce.teacher_dump.cli", *words_of(options))
    made = Ray(words, place(options), place(options).with_name("log"), head_cpus=1)
    yield made
    made.cluster.shutdown()


@pytest.mark.apart
def test_two_nodes_of_which_anything_may_die(options: DumpOptions, ray: Ray) -> None:
    """A node joins late; a worker, the driver and a node are killed."""
    write_corpus(Path(options.corpus[0]), 400)
    wanted, chance = alone(options), random.Random(0)
    driver = ray.begin()
    node = ray.add_node()
    if makers := ray.wait_for_a_maker(driver):
        os.kill(chance.choice(makers), signal.SIGKILL)
    ray.wait_for_a_maker(driver)
    driver.kill()
    assert finish(driver) == -signal.SIGKILL, ray.log.read_text()
    driver = ray.begin()
    ray.wait_for_a_maker(driver)
    ray.cluster.remove_node(node, allow_graceful=False)
    assert finish(driver) == 0, ray.log.read_text()
    assert whole(options) == wanted
    said = ray.log.read_text()
    says(said, "ray: 2 nodes with 2 places", "ray: 1 node with 1 place", "next: student-train")
    assert "Traceback" not in said and "WARN" not in said


@pytest.mark.apart
def test_what_a_worker_refuses_is_one_line_here(options: DumpOptions, ray: Ray) -> None:
    dump(options)
    driver = ray.begin("--max-length", 32)
    assert finish(driver) == 1
    lines = [line for line in ray.log.read_text().splitlines() if line.startswith("Error")]
    assert len(lines) == 1 and "Traceback" not in ray.log.read_text()
    says(lines[0], "a worker on ", "finished with other arguments", "--max-length")


@pytest.mark.apart
def test_ctrl_c_on_a_cluster_of_this_machine_alone(options: DumpOptions, tmp_path: Path) -> None:
    write_corpus(Path(options.corpus[0]), 400)
    wanted, log, queue = alone(options), tmp_path / "log", PartQueue(options.out)
    words = words_of(options, "--ray", "local")
    driver = fork(in_small_parts, "teachonce.teacher_dump.cli", *words, log=log)
    while not queue.leased() and driver.is_alive():
        time.sleep(0.01)
    os.kill(driver.pid or 0, signal.SIGINT)
    assert finish(driver) == 130, log.read_text()
    says(log.read_text(), "Stopped: ", "written; run the same command to continue")
    said: list[str] = []
    done, before = share_on_ray(replace(options, ray="local"), said.append)
    assert done.store and before < done.store.parts
    assert whole(options) == wanted


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


def sweep_words(store: Path, out: Path, address: str, steps: int) -> Words:
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
    words = sweep_words(store, out, cluster.address, 400)
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
    words = sweep_words(store, out, "local", 2000)
    driver = fork(command, "teachonce.student_train.sweep", *words, log=log)
    wait_for(lambda: writer(out) or not driver.is_alive(), 300)
    os.kill(driver.pid or 0, signal.SIGINT)
    assert finish(driver) == 130, log.read_text()
    says(log.read_text(), "all students are saved; continue with the same command")
    assert "failed" not in states(out) and "Traceback" not in log.read_text()
    assert list(out.glob("*/checkpoints/*.pt"))
