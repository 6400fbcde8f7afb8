"""Rerankers: a number for each pair of texts, and students that CrossEncoder loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import Words, ok, refused, says
from tests.end_to_end.test_students_of_pairs import reader_of_pairs, rows
from tests.making.models import Teachers, Tokenizers

IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}
ONE: dict[str, Any] = {"num_labels": 1, "sentence_transformers": IDENTITY}
ASKED: Words = ("--head", "score", "--text-column", "one,two", "--device", "cpu")


@pytest.fixture(scope="module")
def teacher(
    pair_teacher: Path, tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Tokenizers
) -> Path:
    """Save a BERT with one output, high if the middle words of both texts are equal: a third of the
    difference of the classifier's two logits."""
    trained: Any = AutoModelForSequenceClassification.from_pretrained(pair_teacher)
    network, tokenizer = reader_of_pairs(make_tokenizer, **ONE)
    network.bert.load_state_dict(trained.bert.state_dict())
    for own, both in zip(
        network.classifier.parameters(), trained.classifier.parameters(), strict=True
    ):
        own.data = (both.data[1:] - both.data[:1]) / 3
    folder = tmp_path_factory.mktemp("reranker")
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    corpus = folder / "pairs.csv"
    lines = [f"{a},{b}" for a, b, _ in rows(3, 600)]
    corpus.write_text("\n".join(["one,two", *lines]) + "\n", "utf-8")
    words = ("--model", teacher, "--corpus", corpus, "--out", folder / "a.zarr")
    printed = ok(teacher_dump, *words, *ASKED, "--hidden", "layer:2")
    says(printed, "features  logits a score of each pair, hidden layer:2, attention none")
    return folder / "a.zarr"


def predicted(folder: Path, pairs: list[tuple[str, str]]) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict(pairs, batch_size=16)


@pytest.mark.slow
def test_scores_are_those_of_the_library(teacher: Path, store: Path) -> None:
    fs = open_store(store)
    assert fs.features.task and fs.features.task.is_score and not fs.features.attention
    records = [fs[i] for i in range(40)]
    kept = np.array([record.views[0].class_logits[0] for record in records])
    pairs = [(record.texts[0], record.texts[1]) for record in records]
    assert np.allclose(kept, predicted(teacher, pairs), atol=1e-4)
    says(ok(feature_store, "info", store), "task        a score of pairs of texts")
    says(ok(feature_store, "show", store, "0"), f"score {kept[0]:.4g}")
    ok(feature_store, "verify", store, "--model", teacher, "--device", "cpu")


@pytest.mark.slow
def test_a_student_ranks_as_its_teacher(store: Path, teacher: Path, tmp_path: Path) -> None:
    words: Words = (
        "--store", store, "--student", "bert:32x2x4", "--vocab", "60", "--lr", "3e-3",
        "--batch-tokens", "1024", "--device", "cpu", "--precision", "fp32",
    )  # fmt: skip
    printed = ok(student_train, *words, "--out", tmp_path / "default", "--steps", "2")
    says(printed, "1 logit + 1 margin", "valid_spearman")
    loss = ("--loss", "logit=1,margin=1,hidden=1")
    ok(student_train, *words, *loss, "--out", tmp_path / "s", "--steps", "220")
    pairs = [(a, b) for a, b, _ in rows(11, 200)]
    own, wanted = predicted(tmp_path / "s", pairs), predicted(teacher, pairs)
    assert own.min() < -0.1  # no sigmoid, as the teacher has none
    assert np.corrcoef(own, wanted)[0, 1] > 0.9
    card = (tmp_path / "s" / "README.md").read_text()
    says(card, "pipeline_tag: text-ranking", 'CrossEncoder("this folder")')


def test_refused(store: Path, teacher: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    corpus = tmp_path / "pairs.csv"
    corpus.write_text("one,two\nA text.,Another.\n", "utf-8")
    words: Words = ("--model", teacher, "--corpus", corpus, "--out", tmp_path / "a.zarr")
    line = refused(teacher_dump, *words, "--head", "score")
    says(line, "--head score: a score needs two texts; name their columns, --text-column A,B")
    line = refused(teacher_dump, *words, *ASKED, "--label-column", "one")
    says(line, "--label-column one: a score has no classes")
    classes = tiny_teacher("bert", "classification", ("yes", "no"))
    line = refused(teacher_dump, "--model", classes, *words[2:], *ASKED)
    says(line, "--head score needs one output, and the checkpoint has 2; use --head classific")
    line = refused(student_train, "--store", store, "--loss", "kl=1", "--out", tmp_path / "s")
    says(line, "--loss kl: the teacher of", "gives one score and has no classes")
