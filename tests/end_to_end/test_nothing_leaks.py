"""A folder full of canaries takes part in every push and every page, and no canary is published."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.student_export.cli import main as student_export
from teachonce.student_export.costs import Costs
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import STUDENT, Word, ok, report_of
from tests.hub_contents import Hub
from tests.hub_server import asked_by_this_process, serving
from tests.making.dumps import write_corpus
from tests.making.models import Teachers

CANARY = "CANARY"
SECRET = f"https://me:{CANARY}@host:8/a.zarr?X-Amz-Signature={CANARY}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(tmp_path / "storage") as hub:
        asked_by_this_process(hub, monkeypatch, tmp_path / "home")
        monkeypatch.setattr(socket, "gethostname", lambda: f"{CANARY}-host")
        yield hub


@pytest.fixture
def home(tmp_path: Path, tiny_teacher: Teachers) -> Path:
    """Return a folder whose path contains the user's name; all commands receive absolute paths."""
    home = tmp_path / f"{CANARY}-home"
    home.mkdir()
    shutil.copytree(tiny_teacher("distilbert"), home / "teacher")
    write_corpus(home / "corpus.txt")
    return home


def dumped(home: Path, out: Path, *more: Word) -> Path:
    words = ("--model", home / "teacher", "--corpus", home / "corpus.txt", "--out", out)
    ok(teacher_dump, *words, "--logits", "topk:8", "--device", "cpu", *more)
    return out


def sent(hub: Hub, name: str) -> dict[str, bytes]:
    """Return all uploads except large files, of which the tests' hub has only chunks."""
    found = dict[str, bytes]()
    for each in hub.repositories[name].files():
        with suppress(KeyError):
            found[each] = hub.read(name, each)
    return found


def check(what: dict[str, bytes]) -> None:
    assert what
    for name, data in what.items():
        for word in (CANARY, str(Path.home()), "/home/"):
            place = data.find(word.encode())
            assert place < 0, f"{name}: {data[max(0, place - 60) : place + 80]!r}"


def plant(folder: Path) -> None:
    """Write files of all kinds that do not belong to a student, and canaries into its own files."""
    (folder / ".env").write_text(f"HF_TOKEN={CANARY}")
    (folder / "notes.txt").write_text(CANARY)
    (folder / "metrics.jsonl").open("a").write(f'{{"{CANARY}": 1}}\n')
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "step-1.pt").write_text(CANARY)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "notes.txt").write_text(CANARY)
    (folder / "link").symlink_to(folder.parent)
    report = report_of(folder)
    report["settings"] |= {"store": SECRET, "word_vectors": f"{folder}/vectors.txt"}
    report["start"] = [f"cut out of {folder}/teacher, then trained", f"read {SECRET}"]
    (folder / "training.json").write_text(json.dumps(report))
    with (folder / "README.md").open("a") as card:
        card.write(f"\nof https://me:{CANARY}@host/a\n")


@pytest.mark.parametrize("ext", ("zarr", "h5"))
def test_a_store_and_its_page(hub: Hub, home: Path, ext: str) -> None:
    store = dumped(home, home / f"a.{ext}", "--no-weights", "--limit", 30)
    (store / CANARY if ext == "zarr" else home / CANARY).write_text(CANARY)  # not of the store
    ok(feature_store, "page", store, "--vocab", home / "teacher", "--out", home / "page.html")
    ok(feature_store, "push", store, "user/store")
    check(sent(hub, "datasets/user/store"))
    of_store = [store] if ext == "h5" else [p for p in store.rglob("*") if p.name != CANARY]
    assert not any(CANARY in name for name in hub.repositories["datasets/user/store"].files())
    check({str(each): each.read_bytes() for each in of_store if each.is_file()})
    check({"page": (home / "page.html").read_bytes()})


@pytest.mark.slow
def test_a_student_and_its_sweep(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers alone, from processes that import torch again.
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: Costs(1))
    store = dumped(home, home / "a.zarr")
    words = ("--store", store, "--vocab", home / "teacher", "--steps", 2, *STUDENT)
    (home / "sweep.toml").write_text(f"vocab = ['{home / 'teacher'}', '300']\n")
    some = ("--store", store, "--steps", 2, *STUDENT, "--grid", home / "sweep.toml")
    ok(student_sweep, *some, "--out", home / "sweep")
    check({"page": (home / "sweep" / "index.html").read_bytes()})
    ok(student_train, *words, "--out", home / "mine")
    plant(home / "mine")
    ok(student_train, "push", home / "mine", "user/mine")
    check(sent(hub, "models/user/mine"))
    ok(student_export, home / "mine", "--to", "torchscript", "--out", home / "mine" / "exported")
    check({each.name: each.read_bytes() for each in (home / "mine/exported").glob("*.*")})
