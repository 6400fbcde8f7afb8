"""Work that is stopped or killed anywhere continues as if it had not been interrupted.

- A dump or a training that is killed anywhere and restarted ends as if it had not been interrupted.
- An unfinished dump continues with the same arguments only; the error line names the differing
  ones.
- Ctrl-C and SIGTERM give one line with the saved state and the command to continue, and the usual
  exit code.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from harness.processes import command, finish, fork, in_small_parts
from teachonce.store import open_store
from teachonce.store.tools.info import info_lines
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support import signals
from teachonce.support.errors import UserError
from teachonce.support.signals import stoppable
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.windows import sequences
from teachonce.teacher_dump.windows.cutting import iter_windows
from tests.end_to_end import dumping
from tests.end_to_end.support import ROOT, STUDENT, Words, invoke, ok, refused, tree
from tests.making.dumps import dump_options, write_corpus
from tests.making.environment import printed_by
from tests.making.models import Teachers
from tests.store.dying import unsealed

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


def wait_while_alive(process: ForkServerProcess, reached: Callable[[], bool]) -> None:
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
        assert "was finished with other arguments: --views is 2 in the store and 3 now" in line
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
    wait_while_alive(killed, lambda: step <= last_step(out))
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
    wait_while_alive(stopped, lambda: last_step(out) >= 14)
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
    printed = printed_by(sys.executable, "-c", code, store, cwd=ROOT, PYTHONHASHSEED="1")
    found.add(printed.strip())
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
        wait_while_alive(process, lambda before=before: published(parts) > before)  # type: ignore[misc]
        time.sleep(random.Random(number).uniform(0, 0.1))
        process.kill()
        assert finish(process) == -signal.SIGKILL
    left = tree(tmp_path)
    with pytest.raises(UserError, match=r"--seed is 0 in the store and 1"):
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


def other_weights(folder: Path) -> None:
    model = folder / "model"
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "layer.1.output.dense.weight" in name)
    weights[name][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    model = folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = tokenizer.backend_tokenizer.to_str()
    lower = backend.replace('"lowercase":false', '"lowercase":true')
    tokenizer._tokenizer = Tokenizer.from_str(lower)
    assert tokenizer.backend_tokenizer.to_str() != backend
    tokenizer.save_pretrained(model)


def other_corpus(folder: Path) -> None:
    corpus = folder / "corpus.txt"
    text = corpus.read_text(encoding="utf-8")
    corpus.write_text(text[:-2] + "!\n", encoding="utf-8")


CHANGES: list[tuple[Callable[[Path], None] | dict[str, Any], str]] = [
    (other_weights, r"the model \(weights_hash\) is .* in the store and .* now"),
    (other_tokenizer, r"the model's tokenizer is .* in the store and .* now"),
    (other_corpus, r"the corpus \(source 1, sha256\) is .* in the store and .* now"),
    ({"max_length": 64}, r"--max-length is 128 in the store and 64 now"),
    ({"seed": 1}, r"--seed is 0 in the store and 1 now"),
    ({"mask_words": "rare"}, r"--mask-words is not given in the store and rare now"),
    ({"hidden": "layer:2"}, r"--hidden \(0\) is mean in the store and layer2 now"),
]


@pytest.mark.slow
def test_what_differs_is_named(tmp_path: Path, tiny_teacher: Teachers) -> None:
    """For HDF5 stores see tests/store/write/test_writing.py."""
    corpus, out = write_corpus(tmp_path / "corpus.txt", 30), tmp_path / "store.zarr"
    model = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    spare = Path(shutil.copytree(model, tmp_path / "spare"))

    with unsealed():
        dump(dump_options(model, corpus, out, views=2))
    before = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
    text = corpus.read_bytes()
    for change, line in CHANGES:
        changes = change if isinstance(change, dict) else {}
        if callable(change):
            change(tmp_path)
        with pytest.raises(UserError, match=line) as refused:
            dump(dump_options(model, corpus, out, views=2, **changes))
        assert "use the same arguments to continue, or give another name" in str(refused.value)
        printed = " in the store and "
        assert str(refused.value).count(printed) == line.count(printed), refused.value
        shutil.rmtree(model)
        shutil.copytree(spare, model)
        corpus.write_bytes(text)
        left = {name: data for name, data in tree(tmp_path).items() if name.startswith("store")}
        assert left == before
    done = dump(dump_options(model, corpus, out, views=2))
    assert done.resumed_parts == done.parts


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
