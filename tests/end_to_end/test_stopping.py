"""Ctrl-C and SIGTERM give one line with the saved state and the command to continue, and the usual
exit code."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.processes import finish, fork, in_small_parts
from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.support import signals
from teachonce.support.errors import UserError
from teachonce.support.signals import stoppable
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from tests.end_to_end.support import STUDENT, Words, invoke, refused
from tests.making.dumps import write_corpus
from tests.making.models import Teachers

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
FEW = ("--batch-tokens", 256, "--logits", "topk:8", "--attention", "none", "--device", "cpu")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Words:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", 40)
    return ("--model", tiny_teacher("bert"), "--corpus", corpus, *FEW, "--out")


def wait_for(reached: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def last_line(log: Path) -> str:
    """Return the last line, and check that there is no traceback."""
    text = log.read_text()
    assert "Traceback" not in text and "Exception ignored" not in text, text
    return text.splitlines()[-1]


def parts_of(store: Path) -> int:
    folder = store / "parts" if store.suffix == ".zarr" else Path(f"{store}.parts")
    return sum(path.stem.isdecimal() for path in folder.iterdir()) if folder.exists() else 0


@pytest.mark.parametrize(
    ("ext", "number"), [("zarr", signal.SIGINT), ("h5", signal.SIGTERM)], ids=["zarr", "h5"]
)
def test_stopped_dump(tmp_path: Path, words: Words, ext: str, number: signal.Signals) -> None:
    store, log = tmp_path / f"store.{ext}", tmp_path / "log"
    dump = ("teachonce.teacher_dump.cli", *words, store)
    early = fork(in_small_parts, *dump, log=log)
    wait_for(lambda: log.exists() and "batch, seed" in log.read_text())
    os.kill(early.pid or 0, number)
    assert finish(early) == CODES[number]
    why = "nothing is written yet; the same command starts from the beginning"
    assert last_line(log) == f"Stopped: {store}: {why}"
    stopped = fork(in_small_parts, *dump, log=log)
    wait_for(lambda: parts_of(store) > 1)
    os.kill(stopped.pid or 0, number)
    assert finish(stopped) == CODES[number]
    found = re.fullmatch(
        rf"Stopped: {store}: (\d+) parts? with ([\d,]+) teacher tokens written; "
        "run the same command to continue",
        last_line(log),
    )
    assert found and int(found[1]) == parts_of(store)
    with_parts = open_store(store, allow_partial=True)
    assert with_parts.meta["tokens"] == int(found[2].replace(",", ""))
    assert len(with_parts.manifest.parts) == int(found[1])
    with_parts.close()
    assert not (tmp_path / f".{store.name}.lease").exists()
    assert finish(fork(in_small_parts, *dump, log=log)) == 0
    assert f"({found[1]} " in log.read_text()  # parts that were there from before
    assert len(open_store(store).manifest.parts) > int(found[1])


def test_stopped_training(tmp_path: Path, store: Path) -> None:
    """For SIGTERM see tests/end_to_end/test_resume.py."""
    number, log, out = signal.SIGINT, tmp_path / "log", tmp_path / "student"
    settings = ("--vocab", 500, *STUDENT, "--steps", 5000, "--loss", "mlm=1,hidden=1")
    train = ("teachonce.student_train.cli", "--store", store, "--out", out, *settings)
    early = fork(in_small_parts, *train, log=log)
    wait_for(lambda: log.exists() and "device" in log.read_text())
    os.kill(early.pid or 0, number)
    assert finish(early) == CODES[number]
    resume = ["--resume"] if (out / "training.json").exists() else []
    with_it = " and --resume" if resume else ""
    assert last_line(log).endswith(f"continue with the same command{with_it}")
    stopped = fork(in_small_parts, *train, *resume, log=log)
    wait_for(lambda: (out / "metrics.jsonl").exists())
    assert "another process is writing it" in refused(student_train, *train[1:], "--resume")
    os.kill(stopped.pid or 0, number)
    assert finish(stopped) == CODES[number]
    newest = sorted((out / "checkpoints").glob("step-*.pt"))[-1]
    assert last_line(log) == (
        f"Stopped: {out}: saved at step {int(newest.stem[5:])} ({newest}); "
        "continue with the same command and --resume"
    )


@pytest.mark.slow
def test_stopped_sweep(tmp_path: Path, store: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "sweep"
    settings = ("--vocab", 500, *STUDENT, "--steps", 30, "--loss", "mlm=1", "--loss", "hidden=1")
    sweep = ("teachonce.student_train.sweep", "--store", store, "--out", out, *settings)
    stopped = fork(in_small_parts, *sweep, log=log)
    wait_for(lambda: list(out.glob("*/metrics.jsonl")))
    os.kill(stopped.pid or 0, signal.SIGINT)
    assert finish(stopped) == 130
    saved = r"saved at step \d+ \(.*\); continue with the same command"
    assert re.fullmatch(rf"Stopped: {out}/.*: {saved}", last_line(log))
    assert finish(fork(in_small_parts, *sweep, log=log)) == 0
    assert len(list(out.glob("*/model.safetensors"))) == 2


def sleep_on() -> None:
    with stoppable() as stop, stop.deferred():
        print("asleep", flush=True)
        while not stop.requested:
            time.sleep(0.01)
        print("stopping", flush=True)
        while True:
            time.sleep(9)


@pytest.mark.parametrize("number", CODES)
def test_the_second_signal_leaves_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = fork(sleep_on, log=(log := tmp_path / "log"))
    wait_for(lambda: "asleep" in log.read_text())
    os.kill(process.pid or 0, number)
    # A second signal that comes before the first is handled would be one with it.
    wait_for(lambda: "stopping" in log.read_text())
    assert process.is_alive()
    os.kill(process.pid or 0, number)
    assert finish(process, 20) == -number


def test_the_thread_that_cuts_the_text_stops_too(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops in the middle of a part, which may be long."""

    cut = 0

    def stopped_at_10(*arguments: Any, **settings: Any) -> Iterator[Any]:
        nonlocal cut
        for window in iter_windows(*arguments, **settings):
            cut += 1
            if cut == 10:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # the main thread has the signal by then
            yield window

    monkeypatch.setattr(sequences, "iter_windows", stopped_at_10)
    result = invoke(teacher_dump, *words, tmp_path / "a.zarr")
    assert result.exit_code == 130 and "starts from the beginning" in result.output
    assert cut < 15


def test_what_the_writing_thread_met_is_reported(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the reason why the dump could not continue."""
    from teachonce.teacher_dump.job import part_writing

    def fails(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: signals._first and signals._first.raised)
        raise UserError("a full disk; make room")

    monkeypatch.setattr(part_writing, "_put", fails)
    # Without states there is no calibration, and the teacher is at work while a batch is written.
    result = invoke(teacher_dump, *words, tmp_path / "a.zarr", "--hidden", "none")
    assert result.exit_code == 130, result.output
    printed = [line.split(":")[0] for line in result.output.splitlines()[-2:]]
    assert printed == ["Error", "Stopped"] and "Error: a full disk; make room\n" in result.output
