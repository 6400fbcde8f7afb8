"""A dump or a training that is killed anywhere and restarted ends as if it had not been
interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from harness.processes import command, finish, fork
from teachonce.store import open_store
from teachonce.store.tools.info import info_lines
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from tests.end_to_end import dumping
from tests.end_to_end.support import ROOT, STUDENT, ok, refused, tree
from tests.making.dumps import write_corpus
from tests.making.models import Teachers

STEPS = 30
SETTINGS = (
    *("--vocab", "500", *STUDENT, "--steps", STEPS, "--held-out", "0.1"),
    *("--loss", "mlm=1,hidden=1,kl=1", "--align", "reduce", "--schedule", "plateau"),
    *("--eval-every", "10", "--checkpoint-every", "6"),
)


@pytest.fixture(scope="module")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "student"
    ok(student_train, "--store", store, "--out", out, *SETTINGS)
    return out


def training(store: Path, out: Path, log: Path | None = None) -> ForkServerProcess:
    words = ("--store", store, "--out", out, *SETTINGS)
    return fork(command, "teachonce.student_train.cli", *words, log=log)


def wait_for(process: ForkServerProcess, reached: Callable[[], bool]) -> None:
    while not reached():
        assert process.is_alive(), process.exitcode
        time.sleep(0.02)


def last_step(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    whole = [row for row in rows if row.endswith("}")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def assert_same_student(out: Path, undisturbed: Path) -> None:
    assert (out / "metrics.jsonl").read_text() == (undisturbed / "metrics.jsonl").read_text()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert not (out / "checkpoints").exists()


def test_a_finished_dump_typed_again_says_so_and_stays(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt", 12)
    for name in ("a.zarr", "a.h5"):
        words = ("--model", tiny_teacher("bert"), "--corpus", corpus, "--out", tmp_path / name)
        first = ok(teacher_dump, *words, "--views", 2)
        before = tree(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("teachonce.teacher_dump.teacher.forward._run", lambda *_: 1 / 0)
            said = ok(teacher_dump, *words, "--views", 2)
        assert f"{tmp_path / name}: was finished before, by the same command" in said
        assert said.splitlines()[-1] == first.splitlines()[-1]
        line = refused(teacher_dump, *words, "--views", 3)
        assert "was finished with other arguments: --views is '2' in the store and '3' now" in line
        line = refused(teacher_dump, *words, "--views", 2, "--hidden", "none")
        assert "--hidden" in line and "give another name" in line
        assert tree(tmp_path) == before
    corpus.write_text("Another text.\n")
    line = refused(teacher_dump, *words, "--views", 2)
    assert "finished with other arguments: the corpus (source 1, bytes) is" in line
    assert "identity" not in line


@pytest.mark.slow
def test_killed_training(tmp_path: Path, store: Path, undisturbed: Path) -> None:
    out, chance = tmp_path / "student", random.Random(1)
    killed = training(store, out)
    step = chance.randrange(7, 20)
    wait_for(killed, lambda: step <= last_step(out))
    killed.kill()
    assert finish(killed) == -signal.SIGKILL
    line = refused(student_train, "--store", store, "--out", out, *SETTINGS)
    assert "exists already" in line and "--resume" in line
    line = refused(student_train, "--store", store, "--out", out, *SETTINGS, "--lr=9", "--resume")
    assert "lr was 0.00" in line and " and is 9.0" in line
    other = [str(word).replace("hidden=1", "hidden=2") for word in SETTINGS]
    line = refused(student_train, "--store", store, "--out", out, *other, "--resume")
    assert "loss was mlm=1,hidden=1,kl=1 and is mlm=1,hidden=2,kl=1;" in line
    ok(student_train, "--store", store, "--out", out, *SETTINGS, "--resume")
    assert_same_student(out, undisturbed)
    for again in ((), ("--resume",)):
        printed = ok(student_train, "--store", store, "--out", out, *SETTINGS, *again)
        assert "finished  " in printed and f"student in {out}\nnext: " in printed
    line = refused(student_train, "--store", store, "--out", out, *SETTINGS, "--lr=9")
    assert "a finished student with other settings: lr was 0.00" in line and "--out" in line
    assert_same_student(out, undisturbed)


@pytest.mark.slow
def test_terminated_training(tmp_path: Path, store: Path, undisturbed: Path) -> None:
    out, log = tmp_path / "student", tmp_path / "log"
    stopped = training(store, out, log)
    wait_for(stopped, lambda: last_step(out) >= 14)
    stopped.terminate()
    assert finish(stopped) == 143
    said = log.read_text()
    printed = [line for line in said.splitlines() if line.startswith("Stopped")]
    assert len(printed) == 1 and printed[0].endswith("continue with the same command and --resume")
    assert "Traceback" not in said
    before, newest = sorted((out / "checkpoints").glob("step-*.pt"))
    assert f": saved at step {int(newest.stem[5:])} ({newest});" in printed[0]
    os.truncate(newest, newest.stat().st_size // 2)
    said = ok(student_train, "--store", store, "--out", out, *SETTINGS, "--resume")
    resumed = f"resume    after step {int(before.stem[5:])} ({newest.name} incomplete: skipped)"
    assert resumed in said.splitlines()
    assert_same_student(out, undisturbed)


def cut_short(store: Path, out: Path, *more: str) -> None:
    """Stop a training after its last step, before the student is written."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("teachonce.student_train.output.run._finish", lambda *_: 1 / 0)
        ok(student_train, "--store", store, "--out", out, *SETTINGS, *more)


def test_another_vocabulary_of_the_same_name(tmp_path: Path, store: Path) -> None:
    out, vocabulary = tmp_path / "student", tmp_path / "vocabulary"
    student_tokenizer("500", open_store(store)).save_pretrained(vocabulary)
    words = ("--vocab", str(vocabulary), "--steps", "3")
    cut_short(store, out, *words)
    file = vocabulary / "tokenizer.json"
    sound = file.read_text()
    pieces = json.loads(sound)
    known = pieces["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    file.write_text(json.dumps(pieces))
    line = refused(student_train, "--store", store, "--out", out, *SETTINGS, *words, "--resume")
    assert "is not the tokenizer that the training started with" in line
    file.write_text(sound)
    ok(student_train, "--store", store, "--out", out, *SETTINGS, *words, "--resume")


def test_other_versions_are_reported_and_kept(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "student"
    cut_short(store, out, "--steps", "3")
    settings = out / "training.json"
    report = json.loads(settings.read_text())
    report["environments"][0]["torch"] = "0.1"
    settings.write_text(json.dumps(report))
    said = ok(student_train, "--store", store, "--out", out, *SETTINGS, "--steps", "3", "--resume")
    assert "the last bits may differ from a training without a stop: torch was 0.1" in said
    kept = [found["torch"] for found in json.loads(settings.read_text())["environments"]]
    assert kept == ["0.1", version("torch")] and '"torch": "0.1"' in (out / "README.md").read_text()


@pytest.mark.slow
def test_killed_after_the_last_step(tmp_path: Path, store: Path, undisturbed: Path) -> None:
    """It has its last checkpoint and metrics, but no student's folder yet."""
    out = tmp_path / "student"
    cut_short(store, out)
    assert last_step(out) == STEPS
    ok(student_train, "--store", store, "--out", out, *SETTINGS, "--resume")
    assert_same_student(out, undisturbed)


@pytest.mark.slow
def test_one_vocabulary_for_one_text(store: Path) -> None:
    code = (
        "import sys; from teachonce.store import open_store\n"
        "from teachonce.student_train.model.student_tokenizer import student_tokenizer\n"
        "print(student_tokenizer('450', open_store(sys.argv[1])).backend_tokenizer.to_str())"
    )
    found = {student_tokenizer("450", open_store(store)).backend_tokenizer.to_str()}
    # sets of texts have another order there, as the hash seed of this process is random
    done = subprocess.run(
        [sys.executable, "-c", code, str(store)], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    found.add(done.stdout.strip())
    assert len(found) == 1


@pytest.mark.parametrize("ext", [pytest.param("zarr", marks=pytest.mark.slow), "h5"])
def test_killed_dump(
    tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch, ext: str
) -> None:
    corpus, model = write_corpus(tmp_path / "corpus.txt", 50), tiny_teacher("bert")
    (tmp_path / "whole").mkdir()
    whole, broken = tmp_path / "whole" / f"store.{ext}", tmp_path / f"store.{ext}"
    parts = broken / "parts" if ext == "zarr" else tmp_path / "store.h5.parts"
    for number in range(2):
        process = fork(dumping.run, model, corpus, broken)
        before = published(parts)
        wait_for(process, lambda before=before: published(parts) > before)  # type: ignore[misc]
        time.sleep(random.Random(number).uniform(0, 0.1))
        process.kill()
        assert finish(process) == -signal.SIGKILL
    left = tree(tmp_path)
    with pytest.raises(UserError, match=r"--seed is '0' in the store and '1'"):
        dump(dumping.options(model, corpus, broken, seed=1))
    assert tree(tmp_path) == left

    with monkeypatch.context() as patch:  # the first process counts the words, once
        patch.setattr("teachonce.teacher_dump.windows.masked_views.COUNTED_WORDS", 1)
        done = dump(dumping.options(model, corpus, broken))
    assert 0 < done.resumed_parts < done.parts
    dump(dumping.options(model, corpus, whole))
    resumed, undisturbed = open_store(broken), open_store(whole)
    assert resumed.manifest == undisturbed.manifest  # it contains a SHA-256 of every array
    assert any("mask words rare" in line for line in info_lines(resumed))
    assert verify(str(broken)).problems == []
    if ext == "zarr":
        assert tree(parts) == tree(whole / "parts")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["corpus.txt", "whole", broken.name]
    )


def published(parts: Path) -> int:
    names = [path.stem for path in parts.iterdir()] if parts.exists() else []
    return sum(name.isdecimal() for name in names)
