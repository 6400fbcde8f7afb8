"""Several processes make the same store, and train the same student, as one process.

- Several processes make the same store as a single process, also if any of them dies.
- Several processes together train the same student as one process.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import sys
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
import numpy as np
import pytest
import torch

from harness.processes import PART_TOKENS, finish, fork, in_small_parts
from harness.store_content import content_of_store
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.errors import StoreError
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.tools.seal import seal
from teachonce.store.write.part_queue import END, PartQueue
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease
from teachonce.support.options import click_options, read_words
from teachonce.teacher_dump.job import sharing
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.training.ranks import join_ranks
from tests.end_to_end.support import ROOT, Words, ok, refused, report_of, says
from tests.end_to_end.watched import Done, processes, together
from tests.making.dumps import write_corpus
from tests.making.environment import printed_by
from tests.making.models import Teachers

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
        sharing.share(options_of(job, part_tokens=PART_TOKENS, **changes), ProcessShard(1, 2))
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
        ({"seed": 4}, "--seed is 3 in the store and 4 now"),
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
        done = sharing.share(options, ProcessShard(0, 1), said.append)
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
        sharing.share(options_of(job, part_tokens=PART_TOKENS), ProcessShard(0, 1))
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


PLAIN = (
    "--vocab", 400, "--student", "16x2x2", "--batch-tokens", 256, "--steps", 5,
    "--loss", "mlm=1,kl=1,hidden=1", "--clip", 1000, "--eval-every", 2,
    "--device", "cpu", "--precision", "fp32",
)  # fmt: skip
STUDENT = (*PLAIN, "--accumulate", 5, "--dropout", 0.1)


def trained(count: int, words: Words, **watched: Any) -> Done:
    """Train with `count` processes; each saves its first gradient next to the student."""
    out = Path(str(words[words.index("--out") + 1]))
    gradients = out.with_name(f"{out.name}.gradient")
    return processes(count, "teachonce.student_train.cli", words, out.parent, gradients, **watched)


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "student"
    found = trained(1, ("--store", store, *STUDENT, "--out", out))
    assert found.codes == [0], found.said
    return out


def same_curve(one: Path, other: Path) -> None:
    for here, there in zip(curve(one), curve(other), strict=True):
        assert here == pytest.approx(there, rel=1e-4)


def same_gradients(one: str, other: str, count: int) -> None:
    """Each of `count` processes has the gradients of a single process, up to the last bits."""
    wanted = torch.load(f"{one}.0")
    first, *others = (torch.load(f"{other}.{rank}") for rank in range(count))
    for each in others:
        torch.testing.assert_close(each, first, rtol=0, atol=0)
    pairs = zip(wanted, first, strict=True)
    whole, got = (
        torch.cat([each.flatten() for each in some])
        for some in zip(*(pair for pair in pairs if pair[0] is not None), strict=True)
    )
    assert float((whole - got).norm() / whole.norm()) < 1e-6


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.apart)])
def test_gradients_and_losses_match_one_process(
    store: Path, alone: Path, tmp_path: Path, count: int
) -> None:
    out = tmp_path / "student"
    found = trained(count, ("--store", store, *STUDENT, "--out", out))
    assert found.codes == [0] * count, found.said
    assert "store " in found.said[0] and f"processes {count}" in found.said[0]
    assert not any("store " in each or "start " in each for each in found.said[1:])
    same_gradients(f"{alone}.gradient", f"{out}.gradient", count)
    same_curve(out, alone)
    report = report_of(out)
    assert report["environments"][0]["processes"] == count
    tokens = report_of(alone)["result"]["tokens"]
    assert report["result"]["tokens"] == tokens


@pytest.mark.slow
def test_a_stop_of_one_stops_all_and_another_number_goes_on(
    store: Path, alone: Path, tmp_path: Path
) -> None:
    words = ("--store", store, *STUDENT, "--out", tmp_path / "student")
    stopped = trained(2, words, stopped=1)
    assert 0 not in stopped.codes
    saved = [path.name for path in (tmp_path / "student/checkpoints").iterdir()]
    assert any("3" in name for name in saved), saved
    again = trained(3, (*words, "--resume"))
    assert again.codes == [0] * 3, again.said
    assert "resume    after step 3" in again.said[0]
    assert "processes was 2 and is 3" in again.said[0]
    same_curve(tmp_path / "student", alone)


@pytest.mark.slow
def test_the_texts_of_a_batch_are_shared_if_a_step_has_one(store: Path, tmp_path: Path) -> None:
    """If a step has two texts, one of three processes has no text."""
    one, three = tmp_path / "one", tmp_path / "three"
    words = (
        "--store", store, "--vocab", 400, "--student", "16x2x2", "--batch-texts", 2, "--steps", 5,
        "--loss", "mlm=1,kl=1,hidden=1,attention=1,contrastive=1", "--eval-every", 2,
        "--clip", 1000, "--device", "cpu", "--precision", "fp32",
    )  # fmt: skip
    alone = trained(1, (*words, "--out", one))
    stopped = trained(3, (*words, "--out", three), stopped=1)
    assert alone.codes == [0] and 0 not in stopped.codes, (alone.said, stopped.said)
    assert "processes 3, which share the texts of each batch" in stopped.said[0]
    same_gradients(f"{one}.gradient", f"{three}.gradient", 3)
    again = trained(3, (*words, "--out", three, "--resume"))
    assert again.codes == [0] * 3 and "resume    after step 3" in again.said[0], again.said
    same_curve(three, one)


@pytest.mark.apart
@pytest.mark.parametrize("student", [STUDENT, PLAIN], ids=["accumulated", "no --accumulate"])
def test_torchrun_itself(store: Path, tmp_path: Path, student: Words) -> None:
    alone, out = tmp_path / "alone", tmp_path / "student"
    assert trained(1, ("--store", store, *student, "--out", alone)).codes == [0]
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("-m", "teachonce.student_train", "--store", store, *student, "--out", out)
    assert printed_by(*run, *words, cwd=ROOT, OMP_NUM_THREADS="1").count("store ") == 1
    same_curve(out, alone)


@pytest.mark.slow
def test_embeddings_of_mixed_vocabularies_match_one_process(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 60)

    def made(count: int, name: str, accumulate: int = 3) -> tuple[Path, Done]:
        out = tmp_path / name
        words = (
            "mixed-vocab", "--model", tiny_teacher("bert"), "--corpus", corpus, "--vocab", 450,
            "--width", 16, "--steps", 4, "--accumulate", accumulate, "--batch-tokens", 256,
            "--max-length", 64, "--device", "cpu", "--precision", "fp32", "--out", out,
        )  # fmt: skip
        gradients = out.with_name(f"{name}.gradient")
        return out, processes(count, "teachonce.teacher_dump.cli", words, tmp_path, gradients)

    one, alone = made(1, "one.zarr")
    two, found = made(2, "two.zarr")
    assert alone.codes == [0] and found.codes == [0, 0], found.said
    same_gradients(f"{one}.gradient", f"{two}.gradient", 2)
    stores = [open_store(path) for path in (one, two)]
    wanted, got = (MixedVocab.of(each).embeddings for each in stores)
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
    lines = [[line for line in said.splitlines() if line.startswith("step 4/4")]
             for said in (*alone.said, *found.said)]  # fmt: skip
    assert lines[0][0].partition("tokens/s")[0].rsplit(" ", 2)[0] in lines[1][0] and not lines[2]
    assert "next: student-train" in found.said[0] and found.said[1] == ""
    assert not (tmp_path / "two.zarr.mixed-vocab").exists()
    *_, refused = made(2, "three.zarr", accumulate=1)
    assert set(refused.codes) == {1}
    assert "--accumulate 1 and 2 processes: a step needs at least one batch" in refused.said[0]


def joins(code: str) -> None:
    with mock.patch("teachonce.training.ranks.installed", lambda: {"code": code, "torch": "2"}):
        try:
            with join_ranks("cpu"):
                print("joined")
        except UserError as error:
            print(error)


def test_a_process_with_other_code_is_refused(tmp_path: Path) -> None:
    found = together(3, tmp_path, lambda rank: (joins, "abc" if rank < 2 else "fed"))
    wanted = f"on {socket.gethostname()}: code is fed, and in the first process abc; install"
    assert found.codes == [0] * 3
    for said in found.said:
        assert wanted in said and "joined" not in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_masked_lm_matches_one_process(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 200)

    def trained_mlm(count: int, name: str, *more: str | int) -> Done:
        words = (
            "--task", "mlm", "--model", "scratch:modernbert:16x1x2",
            "--vocab", 400, "--train", corpus,
            "--max-length", 32, "--batch-size", 6, "--steps", 4, "--evaluate-every", 2,
            "--test", corpus, "--out", tmp_path / name, *more,
        )  # fmt: skip
        gradients = tmp_path / f"{name}.gradient"
        return processes(count, "teachonce.downstream.cli", words, tmp_path, gradients)

    alone, found = trained_mlm(1, "one"), trained_mlm(2, "two")
    assert alone.codes == [0] and found.codes == [0, 0], (alone.said, found.said)
    same_gradients(f"{tmp_path}/one.gradient", f"{tmp_path}/two.gradient", 2)
    one, two = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")
    )
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-5)
    assert two["tokens"] == one["tokens"] and "held-out loss after" not in found.said[1]
    scores = json.loads((tmp_path / "two" / "scores.json").read_text())
    assert scores["mean"]["test"]["loss"] > 0 and f"{corpus}: " in found.said[0]
    refused = trained_mlm(2, "three", "--batch-size", 5)
    assert "--batch-size 5 and 2 processes: a batch cannot be divided evenly" in refused.said[0]
    assert set(refused.codes) == {1} and not (tmp_path / "three").exists()
