"""Students of teachers that are not masked LMs: their states can be trained on, their logits are
refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from teachonce.downstream.cli import main as downstream
from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.downstream.learnable import classified
from tests.end_to_end.support import STUDENT, Words, ok
from tests.making.models import Teachers

STEPS = ("--vocab", "500", "--steps", "3", *STUDENT, "--init", "svd")


def test_states_of_a_causal_teacher(tmp_path: Path, causal: Path) -> None:
    words: Words = ("--store", causal, "--out", tmp_path / "student", *STEPS)
    said = ok(student_train, *words, "--loss", "mlm=1,hidden=30")
    assert "1 mlm + 30 hidden; span" in said


@pytest.mark.slow
def test_from_labelled_texts_to_a_store_of_classes(tmp_path: Path, tiny_teacher: Teachers) -> None:
    train, dev = (classified(tmp_path / f"{n}.tsv", n, seed=n) for n in (120, 30))
    scores, store = tmp_path / "scores", tmp_path / "store.h5"
    words: Words = ("--task", "classify", "--model", tiny_teacher("bert"))
    words = (*words, "--train", train, "--dev", dev)
    learning: Words = ("--epochs", 5, "--lr", 3e-3, "--batch-size", 4, "--seeds", 1)
    ok(downstream, *words, *learning, "--out", scores, "--save")
    words = ("--model", scores / "model", "--corpus", dev, "--text-column", "text")
    said = ok(teacher_dump, *words, "--label-column", "label", "--out", store, "--device", "cpu")
    assert "30 sequences with a gold label" in said
    records = list(open_store(store))
    printed = [record.views[0].class_logits.argmax() == record.label for record in records]
    (seed,) = json.loads((scores / "scores.json").read_text())["seeds"]
    assert np.mean(printed) == seed["dev"]["accuracy"] > 0.8
    out = tmp_path / "student"
    ok(student_train, "--store", store, "--out", out, *STEPS, "--vocab", "teacher")
