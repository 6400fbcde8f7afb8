"""Several processes make the same store as a single process, also if any of them dies."""

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from harness.processes import PART_TOKENS, finish, fork, in_small_parts
from harness.store_content import content_of_store
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.errors import StoreError
from teachonce.store.tools.seal import seal
from teachonce.store.write.part_queue import END, PartQueue
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.options import click_options, read_words
from teachonce.teacher_dump.job import sharing
from teachonce.teacher_dump.job.option_values import Shard
from teachonce.teacher_dump.job.options import DumpOptions
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import write_corpus

DUMP = ("--logits", "sample:9", "--views", 2, "--mask-words", "rare", "--max-length", 64)
FEW = ("--batch-tokens", 256, "--device", "cpu", "--seed", 3)


class Job:
    """Describes a dump that several processes can make."""

    def __init__(self, model: Path, corpus: Path, out: Path, *more: str | int | Path) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        self.corpus, self.out, self.log = corpus, out, out.with_name("log")
        self.words = ("--model", model, "--corpus", corpus, "--out", out, *DUMP, *FEW, *more)

    def begin(self, shard: str | None = None) -> ForkServerProcess:
        chosen = ("--shard", shard) if shard else ()
        return fork(
            in_small_parts, "teachonce.teacher_dump.cli", *self.words, *chosen, log=self.log
        )

    def end(self, *processes: ForkServerProcess) -> None:
        codes = [finish(process, 120) for process in processes]
        assert codes == [0] * len(codes), self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Return a folder in memory if the machine has one: fsync takes most of the time."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        yield Path(folder)


@pytest.fixture
def place(memory: Path, request: pytest.FixtureRequest) -> Path:
    """Return the folder for the store of one test."""
    return memory / re.sub(r"\W", "-", request.node.name)


@pytest.fixture(scope="module")
def corpus(memory: Path) -> Path:
    return write_corpus(memory / "corpus.txt", 50)


@pytest.fixture(scope="module")
def single(model: Path, corpus: Path) -> Callable[[str], object]:
    """Return the store of a single process, by the format."""

    @cache
    def made(ext: str) -> object:
        job = Job(model, corpus, corpus.parent / ext / f"alone.{ext}")
        job.end(job.begin())
        return content_of_store(job.out)

    return made


def options_of(job: Job, **changes: Any) -> DumpOptions:
    command = click.Command("dump", params=click_options(DumpOptions))
    given = command.make_context("dump", [str(word) for word in job.words]).params
    return replace(DumpOptions(**read_words(DumpOptions, given)), **changes)


@pytest.mark.parametrize("ext", ["zarr", pytest.param("h5", marks=pytest.mark.apart)])
def test_two_processes_make_the_store_of_one(
    single: Callable[[str], object], model: Path, corpus: Path, place: Path, ext: str
) -> None:
    job = Job(model, corpus, place / f"store.{ext}")
    job.end(job.begin("0/2"), job.begin("1/2"))
    assert content_of_store(job.out) == single(ext)
    said = job.log.read_text()
    assert said.count("is finished; process") == 2 and said.count("next: student-train") == 1
    late = job.begin("1/2")
    job.end(late)
    assert content_of_store(job.out) == single(ext)
    says(ok(feature_store, "seal", job.out), "is finished already", " sequences, ")


@pytest.mark.slow
@pytest.mark.parametrize("ext", [pytest.param("zarr", marks=pytest.mark.apart), "h5"])
def test_killed_while_others_go_on(
    single: Callable[[str], object], model: Path, corpus: Path, place: Path, ext: str
) -> None:
    """The killed one may be the one that cuts the corpus."""
    chance = random.Random(ext)
    job = Job(model, corpus, place / f"store.{ext}")
    workers = [job.begin("0/2"), job.begin("1/2")]
    for _ in range(3):
        time.sleep(chance.uniform(0.05, 0.5))
        struck = chance.randrange(2)
        workers[struck].kill()
        assert finish(workers[struck]) in (0, -signal.SIGKILL)
        workers[struck] = job.begin(f"{struck}/2")
    job.end(*workers)
    assert content_of_store(job.out) == single(ext)


@pytest.mark.slow
def test_one_process_goes_on_where_several_were_killed(
    single: Callable[[str], object], started: Job
) -> None:
    """It refuses to while one of them is alive."""
    queue = PartQueue(started.out)
    lease = Lease(queue.folder / "1")
    assert finish(started.begin()) == 1
    says(started.log.read_text(), "another process is writing it")
    assert queue.folder.exists()
    lease.close()
    started.end(started.begin())
    assert content_of_store(started.out) == single("zarr")


def refused_to_share(job: Job, **changes: Any) -> str:
    with pytest.raises(UserError) as printed:
        sharing.share(options_of(job, part_tokens=PART_TOKENS, **changes), Shard(1, 2))
    return str(printed.value)


@pytest.fixture(scope="module")
def left_by_one(model: Path, corpus: Path, memory: Path) -> Path:
    """Return the folder of an unfinished store that one of several processes has left."""
    job = Job(model, corpus, memory / "left" / "store.zarr")
    worker = job.begin("0/2")
    while not PartQueue(job.out).leased():
        assert worker.is_alive(), job.log.read_text()
        time.sleep(0.001)
    worker.kill()
    finish(worker)
    (PartQueue(job.out).folder / END).unlink(missing_ok=True)  # it may have cut the whole corpus
    return job.out.parent


@pytest.fixture
def started(left_by_one: Path, model: Path, corpus: Path, place: Path) -> Job:
    shutil.copytree(left_by_one, place)
    return Job(model, corpus, place / "store.zarr")


def test_another_dump_is_refused(started: Job, tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 4}, "--seed is '3' in the store and '4' now"),
        ({"stride": 8}, "--stride is"),
        ({"hidden": "none"}, "--hidden"),
    ]
    for change, printed in changes:
        says(refused_to_share(started, **change), "other arguments", printed)
    text, other = started.corpus.read_text(), tmp_path / started.corpus.name
    other.write_text(text + "One more.\n")
    says(refused_to_share(started, corpus=(str(other),)), "the corpus (source 1, bytes) is")
    other.write_text(text.replace("a", "b", 1))  # the process that cuts the corpus detects it
    says(refused_to_share(started, corpus=(str(other),)), "the corpus (source 1, sha256) is")
    root = started.out / "zarr.json"
    node = json.loads(root.read_text())
    node["attributes"]["software"]["tokenizers"] = "0.1"
    root.write_text(json.dumps(node))
    line = refused_to_share(started)
    says(line, "was started with other versions (tokenizers was 0.1 and is", "without --shard")


@pytest.mark.slow
def test_a_part_that_was_taken_over_is_left_to_the_other(
    single: Callable[[str], object], model: Path, corpus: Path, place: Path
) -> None:
    """The process was silent for too long, and continues with other parts."""
    job = Job(model, corpus, place / "store.zarr")
    said: list[str] = []
    take = PartQueue.take

    def robbed(queue: PartQueue, index: int = 0, size: int = 1) -> Any:
        part = take(queue, index, size)
        if part and part.number == 1 and not any("left to another" in line for line in said):
            part.lease.path.unlink()  # as if another process had then written the part
        return part

    options = options_of(job, part_tokens=PART_TOKENS)
    with mock.patch.object(PartQueue, "take", robbed):
        done = sharing.share(options, Shard(0, 1), said.append)
    assert any(line.startswith("part 1 is left to another process") for line in said)
    assert done.store and done.store.parts == done.parts - 1
    job.log.touch()
    assert content_of_store(job.out) == single("zarr")


def test_a_torn_part_in_the_queue_is_cut_again(
    single: Callable[[str], object], started: Job
) -> None:
    queue = PartQueue(started.out)
    assert queue.numbers()
    for number in queue.numbers():
        file = queue.folder / str(number)
        file.write_bytes(file.read_bytes()[:-100])
    started.end(started.begin("0/1"))
    assert content_of_store(started.out) == single("zarr")


@pytest.mark.slow
def test_sealed_by_hand_where_the_last_process_was_killed(
    single: Callable[[str], object], model: Path, corpus: Path, place: Path
) -> None:
    job = Job(model, corpus, place / "store.zarr")
    with (
        mock.patch.object(sharing, "seal", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        sharing.share(options_of(job, part_tokens=PART_TOKENS), Shard(0, 1))
    with pytest.raises(StoreError, match="is not finished"):
        open_store(job.out)
    said = ok(feature_store, "seal", job.out)
    assert "finished already" not in said
    job.log.touch()
    assert content_of_store(job.out) == single("zarr")


def test_parts_that_are_not_made_yet_are_not_called_lost(started: Job) -> None:
    assert PartQueue(started.out).folder.exists()
    for part in list((started.out / "parts").glob("[0-9]*")):
        shutil.rmtree(part)
    (started.out / "parts" / "3").mkdir()
    with pytest.raises(StoreError, match=r"is not finished \(1 part\)"):
        open_store(started.out)


def test_nothing_is_sealed_too_early(started: Job) -> None:
    with pytest.raises(UserError, match="has not yet read its corpus"):
        seal(started.out)
    queue = PartQueue(started.out)
    queue.end({"parts": 50}, "test")
    words = "parts of 50 not published yet", "0, 1, 2, 3, 4,"
    says(refused(feature_store, "seal", started.out), *words)
