"""`student-train` and `student-sweep` with bad input print one line with the cause and the remedy,
and change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from teachonce.store import FeatureStore
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.sweep import main as student_sweep
from tests.end_to_end.support import STUDENT, ok, refused, says, tree
from tests.making.models import Stores, Teachers

LATER = {  # test_early_errors.py has the refusals before torch is loaded
    "--student 32x3x4 --loss hidden=1": ("groups2", "3 student layers", "--student"),
    "--student bert:32x6x4 --init teacher": ("has 6 layers, the teacher only 4", "--init svd"),
    "--resume": ("no training to resume", "leave --resume out"),
    "--out corpus.txt/student": ("corpus.txt", "--out"),
    "--device cuda": ("--device cuda", "use --device cpu"),
}


@pytest.mark.parametrize("options", LATER)
def test_train_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path, corpus: Path, options: str
) -> None:
    if options == "--device cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    shutil.copy(corpus, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ("--store", store, "--vocab", "500", "--out", "student", *STUDENT, "--steps", "3")
    says(refused(student_train, *words, *options.split()), *LATER[options])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_vocabulary_larger_than_the_text_is_taken_as_far_as_it_goes(
    tmp_path: Path, store: Path
) -> None:
    words = ("--store", store, *STUDENT, "--loss", "mlm", "--out", tmp_path / "out")
    huge = "999999999999999999"
    said = ok(student_train, *words, "--vocab", huge, "--init", "random", "--steps", 0)
    pieces = len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    says(said, f"start     vocabulary of {pieces:,} pieces, not ")
    says(said, f"(--vocab {huge})", "has no more")
    assert f"(--vocab {huge})" in (tmp_path / "out" / "training.json").read_text()
    sweep = (*words[:-1], tmp_path / "sweep", "--steps", 1)
    said = ok(student_sweep, *sweep, "--vocab", "500", "--vocab", "5k")
    assert said.count("has no more") == said.count("not 5,000 (--vocab 5k)") == 1
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[recipes.mine]\noptions = { vocab = "5k" }\n')
    said = ok(student_train, *words[:-1], tmp_path / "r", "--recipe", recipe, "--steps", 1)
    says(said, "not 5,000 (--vocab 5k)")
    pruned = (*words[:-1], tmp_path / "p", "--vocab", "500", "--steps", 1, "--prune-to", "words:5k")
    says(refused(student_train, *pruned), "two WordPieces")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--loss hidden=1", ("--loss hidden", "has no hidden states")),
        ("--loss attention=1", ("--loss attention", "has no attention maps")),
        ("--loss logit=1", ("--loss logit", "use kl")),
        ("--loss mlm=1 --init svd", ("no word embeddings", "--init random")),
    ],
)
def test_store_lacks_what_is_asked_for(
    tmp_path: Path, tiny_store: Stores, options: str, words: tuple[str, ...]
) -> None:
    """The store has draws alone: no states, no maps, no weights."""
    bare = tiny_store("bert", logits="sample:5", hidden="none", attention="none", weights=False)
    given = ("--store", bare, "--vocab", "500", "--out", tmp_path / "student", *STUDENT)
    says(refused(student_train, *given, *options.split()), *words)
    assert not (tmp_path / "student").exists()


def test_student_exists(tmp_path: Path, store: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", "3", "--out")
    line = refused(student_train, *words, tmp_path)
    says(line, "exists already; give another --out")
    assert "--resume" not in line  # there is no training to continue
    says(refused(student_train, *words, tmp_path / "mine"), "exists already", "--out")
    says(refused(student_train, *words, tmp_path, "--resume"), "no training.json")
    assert tree(tmp_path) == {"mine": b"mine"}
    (link := tmp_path / "link").symlink_to(tmp_path / "nowhere")
    says(refused(student_train, *words, link), "link exists already; give another --out")


def test_a_training_that_diverged_is_started_again(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "student"
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", 3, "--out", out, "--lr")
    assert "lower --lr" in refused(student_train, *words, 1e30)
    assert (out / "metrics.jsonl").exists()
    ok(student_train, *words, 1e-3)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert steps == sorted(steps) and len([*(out / "tensorboard").iterdir()]) == 1


def test_tokenizer_folder(tmp_path: Path, store: Path, tiny_teacher: Teachers) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_teacher("bert"))
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "maskless")
    (tmp_path / "bare").mkdir()
    for name, printed in (("maskless", "mask"), ("bare", "(it has no tokenizer.json, nor")):
        words = ("--store", store, "--vocab", tmp_path / name, "--out", tmp_path / "out", *STUDENT)
        says(refused(student_train, *words), "--vocab", name, "tokenizer", printed)
    assert not (tmp_path / "out").exists()


def test_training_that_diverges(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--vocab", "500", "--out", tmp_path / "student", *STUDENT)
    line = refused(student_train, *words, "--steps", "20", "--lr", "1e30", "--loss", "mlm")
    says(line, "step ", "diverged", "lower --lr")
    assert not (tmp_path / "student" / "model.safetensors").exists()
    other = ("--store", store, "--vocab", "500", "--out", tmp_path / "wild", *STUDENT)
    said = ok(student_train, *other, "--steps", "10", "--lr", "9", "--loss", "mlm")
    warnings = [line for line in said.splitlines() if line.startswith("warning")]
    assert "far above the loss before the first step" in warnings[-1] and "(9)" in warnings[-1]


@pytest.mark.parametrize("content", ["{}", "[]", '{"settings": {}}', "{"])
def test_damaged_settings(tmp_path: Path, store: Path, content: str) -> None:
    out = tmp_path / "student"
    out.mkdir()
    (out / "training.json").write_text(content)
    words = ("--store", store, "--vocab", "500", *STUDENT, "--steps", "3", "--out", out)
    says(refused(student_train, *words, "--resume"), "training.json is damaged", "remove")


def test_sweep(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--out", tmp_path / "sweep", *STUDENT, "--steps", "2")
    says(refused(student_sweep, *words[2:], "--store", tmp_path / "nowhere.h5"), "nowhere.h5")
    for more, printed in (
        ("--vocab 500 --vocab 3", ("--vocab 3", "give more")),
        ("--vocab 500 --lr 1e-3,1e-2", ("--lr 1e-3,1e-2: ", "repeat it: --lr 1e-3 --lr 1e-2")),
        ("--vocab 500 --seed 1,2", ("repeat it: --seed 1 --seed 2",)),
    ):
        says(refused(student_sweep, *words, *more.split()), *printed)
    alone = tmp_path / "alone"
    ok(student_train, *words[:2], "--out", alone, *words[4:], "--vocab", "500", "--loss", "mlm")
    before = sorted(path.name for path in alone.iterdir())
    said = refused(student_sweep, *words[:2], "--out", alone, *words[4:], "--vocab", "500")
    says(said, f"--out {alone}: is the folder of a student")
    assert sorted(path.name for path in alone.iterdir()) == before
    assert not (tmp_path / "sweep").exists()  # reported before the first student is trained


def test_stores_are_closed(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed = FeatureStore.close, list[str]()

    def close(self: FeatureStore) -> None:
        closed.append(self.path)
        real(self)

    monkeypatch.setattr(FeatureStore, "close", close)
    words = ("--store", store, "--out", tmp_path / "out", *STUDENT, "--loss", "mlm", "--view", "1")
    for command in (student_train, student_sweep):
        says(refused(command, *words), "--view 1")
    assert closed == [str(store)] * 2


def test_address_without_out() -> None:
    line = refused(student_train, "--store", "memory://store.zarr", "--loss", "mlm", "--steps", "2")
    says(line, "memory://store.zarr", "--out")
