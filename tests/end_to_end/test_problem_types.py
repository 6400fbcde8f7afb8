"""Classifiers with other problem types than a single label: several labels at once, and numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, TaskSpec, open_store
from teachonce.student_export.loaded_student import load_student
from teachonce.student_train.cli import main as student_train
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.dumps import write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import features_of, make_store
from tests.teacher_dump.windows.test_label_numbers import MOODS

SEVERAL, NUMBERS = "multi_label_classification", "regression"
TRAINED: Words = (
    "--student", "16x2x2", "--vocab", "400", "--lr", "3e-3", "--batch-tokens", "512",
    "--device", "cpu", "--precision", "fp32",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("texts") / "c.txt", 60)


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers
) -> Callable[..., Path]:
    """Return a function `teacher(...)` -> folder of a classifier with these fields in its
    config.json."""
    root = tmp_path_factory.mktemp("teachers")

    def made(kind: str = "classification", labels: Any = MOODS, **fields: Any) -> Path:
        folder = root / f"{len(list(root.iterdir()))}"
        shutil.copytree(tiny_teacher("bert", kind, labels), folder)
        return changed(folder, "config.json", **fields)

    return made


def dump(model: Path, corpus: Path, out: Path, *more: str) -> Words:
    return ("--model", model, "--corpus", corpus, "--out", out, "--device", "cpu", *more)


@pytest.fixture(scope="module")
def several(
    teacher: Callable[..., Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Save a teacher of several labels at once, whose outputs differ by text, and make its
    store."""
    model, folder = teacher(problem_type=SEVERAL), tmp_path_factory.mktemp("several")
    logits = torch.stack(answers(model, corpus.read_text("utf-8").splitlines()[:40]))
    network = AutoModelForSequenceClassification.from_pretrained(model)
    scale, bias = 0.3 / logits.std(dim=0), network.classifier.bias.data
    network.classifier.weight.data *= scale[:, None]
    network.classifier.bias.data = (bias - logits.mean(dim=0)) * scale + torch.tensor([2, 0.5, -2])
    network.save_pretrained(model)
    printed = ok(teacher_dump, *dump(model, corpus, folder / "a.zarr", "--hidden", "none"))
    says(printed, f"features  logits of 3 outputs ({SEVERAL})")
    return model, folder / "a.zarr"


def answers(folder: Path, texts: list[str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [
            network(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
            for text in texts
        ]


@pytest.mark.slow
def test_several_labels_are_learnt_as_sigmoids(
    several: tuple[Path, Path], corpus: Path, tmp_path: Path
) -> None:
    model, store = several
    fs, out = open_store(store), tmp_path / "s"
    assert fs.task == TaskSpec("classification", MOODS, problem_type=SEVERAL)
    printed = ok(student_train, "--store", store, *TRAINED, "--steps", "60", "--out", out)
    says(printed, "1 kl", "valid_agreement")
    texts = corpus.read_text("utf-8").splitlines()[:40]
    own, wanted = (torch.stack(answers(each, texts)).sigmoid() for each in (out, model))
    assert (wanted.sum(dim=1) > 1.3).all()  # no softmax
    assert (own - wanted).abs().mean() < 0.1
    # transformers' own pipeline and loss recognise the student's problem type
    assert json.loads((out / "config.json").read_text())["problem_type"] == SEVERAL
    said = {each["label"]: each["score"] for each in pipeline(
        "text-classification", str(out), device="cpu"
    )(texts[0], top_k=None)}  # fmt: skip
    assert [said[name] for name in MOODS] == pytest.approx(own[0].tolist(), abs=1e-5)
    card = (out / "README.md").read_text()
    says(card, "any number of labels", 'predict("A text.", top_k=None)', "in nats per label")
    exported = load_student(out)
    assert exported.task is not None and exported.task.problem_type == SEVERAL
    ok(feature_store, "verify", store, "--model", model, "--device", "cpu")
    says(ok(feature_store, "info", store), "any of 3 labels: ")
    shown = json.loads(ok(feature_store, "show", store, "0", "--json"))
    chances = 1 / (1 + np.exp(-fs[0].views[0].class_logits))
    found = {each["label"]: each["probability"] for each in shown["says"]}
    assert [found[name] for name in MOODS] == pytest.approx(chances.tolist(), abs=1e-6)


def test_what_cannot_be_honoured_is_refused(
    several: tuple[Path, Path], teacher: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    model, store = several
    table = tmp_path / "t.tsv"
    table.write_text("text\tlabel\nA text.\tpositive\nAnother.\tneutral\n")
    words = dump(model, table, tmp_path / "a.zarr", "--label-column", "label")
    says(refused(teacher_dump, *words), "--label-column label: the teacher", "several labels at")
    tagger = teacher("tagging", problem_type=SEVERAL)
    line = refused(teacher_dump, *dump(tagger, corpus, tmp_path / "a.zarr"))
    says(line, f"problem_type in its config.json is {SEVERAL}", "a tagger", "remove problem_type")
    misspelt = teacher(problem_type="multi_label")
    line = refused(teacher_dump, *dump(misspelt, corpus, tmp_path / "a.zarr"))
    says(line, "problem_type in its config.json is 'multi_label', expected single_label_class")
    out: Words = ("--out", tmp_path / "s")
    line = refused(student_train, "--store", store, *TRAINED, "--loss", "ce=1", *out)
    says(line, "--loss ce: the teacher of", "several labels at once")
    says(line, "use kl, logit, hard, log-odds")
    plain = tmp_path / "plain.zarr"
    ok(teacher_dump, *dump(teacher(), corpus, plain, "--hidden", "none"))
    line = refused(student_train, "--store", store, "--store", plain, *TRAINED, *out)
    says(line, "has problem_type single_label_classification, the teacher of", f" {SEVERAL}")
    scored: Words = ("--task", "classify", "--model", model, "--as-is", "--test", table)
    line = refused(downstream, *scored, *out)
    says(line, f"predicts several labels for each text (problem_type {SEVERAL}")
    says(line, "scores one label;")


def test_numbers_stay_numbers(teacher: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    for name, model in (
        ("three", teacher(problem_type=NUMBERS)),
        ("one", teacher(labels=("score",), problem_type=NUMBERS)),
    ):
        store, out = tmp_path / f"{name}.zarr", tmp_path / name
        ok(teacher_dump, *dump(model, corpus, store, "--hidden", "none"))
        logit = float(open_store(store)[0].views[0].class_logits[0])
        says(ok(feature_store, "show", store, "0"), f"{logit:.3f}"[:-1])
        line = refused(student_train, "--store", store, *TRAINED, "--loss", "kl=1", "--out", out)
        says(line, "--loss kl: the teacher of", "use logit, margin or losses of hidden states")
        printed = ok(student_train, "--store", store, *TRAINED, "--steps", "2", "--out", out)
        says(printed, "1 logit + 1 margin")
        assert json.loads((out / "config.json").read_text())["problem_type"] == NUMBERS
        text = corpus.read_text("utf-8").splitlines()[0]
        said = pipeline("text-classification", str(out), device="cpu")(text, top_k=None)
        want = sorted(answers(out, [text])[0].tolist(), reverse=True)  # no sigmoid, no softmax
        assert [each["score"] for each in said] == pytest.approx(want, abs=1e-5)


def test_the_activation_of_a_cross_encoder_tells_several_labels(
    teacher: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    """sentence-transformers ignores `problem_type`, and writes the activation instead."""
    about = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    model = teacher(sentence_transformers=about)
    ok(teacher_dump, *dump(model, corpus, tmp_path / "a.zarr", "--hidden", "none"))
    fs = open_store(tmp_path / "a.zarr")
    assert fs.task and fs.task.output_kind == "several labels"
    words: Words = (*TRAINED, "--steps", "1", "--out", tmp_path / "s")
    ok(student_train, "--store", tmp_path / "a.zarr", *words)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["sentence_transformers"]["activation_fn"] == about["activation_fn"]
    assert config["problem_type"] == SEVERAL


def test_stores_of_before_have_the_problem_type_in_the_config(tmp_path: Path) -> None:
    files = {"config.json": json.dumps({"problem_type": SEVERAL}).encode()}
    make_store(tmp_path / "a.zarr", features_of(tier="classification"), files=files)
    fs: FeatureStore = open_store(tmp_path / "a.zarr")
    assert fs.features.task and fs.features.task.problem_type is None
    assert fs.task and fs.task.output_kind == "several labels"
