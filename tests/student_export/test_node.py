"""Exports of every task run in Node: transformers.js, with examples/run_export.mjs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.student_export.test_browser import TRANSFORMERS_JS
from tests.student_export.test_export import EXAMPLE, UNMEASURED, embedder, run
from tests.student_predict.test_predict import answers

Teacher = Callable[..., Path]
CLASSES = ("good", "bad", "so")
TEXTS: tuple[str, ...] = ("the old lamp", "moss")
KINDS: dict[str, tuple[Any, str, tuple[str, ...], tuple[str, ...]]] = {
    "mlm": (AutoModelForMaskedLM, "mlm", (), ("the [MASK] lamp",)),
    "classifier": (AutoModelForSequenceClassification, "classification", CLASSES, TEXTS),
    "several labels": (AutoModelForSequenceClassification, "classification", CLASSES, TEXTS),
    "reranker": (AutoModelForSequenceClassification, "classification", ("LABEL_0",), ("a\tmoss",)),
    "tagger": (AutoModelForTokenClassification, "tagging", ("DET", "ADJ", "NOUN"), TEXTS),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the example to a folder with transformers.js."""
    npm = shutil.which("npm") or pytest.skip("needs npm")
    folder = tmp_path_factory.mktemp("node")
    words = ("install", "--ignore-scripts", "--no-audit", "--no-fund", TRANSFORMERS_JS)
    subprocess.run([npm, *words], cwd=folder, check=True, capture_output=True)
    return Path(shutil.copy(EXAMPLE.with_suffix(".mjs"), folder))


def by_node(script: Path, folder: Path, *texts: str) -> list[Any]:
    words = ["node", str(script), str(folder), *texts]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.apart
@pytest.mark.parametrize("kind", [*KINDS, "embedder"])
def test_node_answers_as_student_predict(
    kind: str, script: Path, tiny_teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node has the results of student-predict. `apart`, as it fetches transformers.js from npm."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    student, texts = tmp_path / "student", TEXTS
    if kind == "embedder":
        embedder(tiny_teacher("bert"), student)
    else:
        auto, head, labels, texts = KINDS[kind]
        several = {"problem_type": "multi_label_classification"}
        more = several if kind == "several labels" else {}
        teacher = tiny_teacher("bert", head, labels) if labels else tiny_teacher("bert")
        auto.from_pretrained(teacher, num_hidden_layers=1, **more).save_pretrained(student)
        AutoTokenizer.from_pretrained(teacher).save_pretrained(student)
    assert run(student, "--to", "onnx", "--out", tmp_path / "out").exit_code == 0
    expected = answers(tmp_path / "out", *texts, *["--pairs"] * (kind == "reranker"))
    for found, answer in zip(by_node(script, tmp_path / "out", *texts), expected, strict=True):
        if kind == "embedder":
            assert found == pytest.approx(answer["vector"], abs=1e-4)
        elif kind == "reranker":
            assert found == pytest.approx([answer["score"]], abs=1e-4)
        elif kind == "mlm":
            pieces = {each["piece"]: each["probability"] for each in answer["masks"][0]["pieces"]}
            got = {each["token_str"]: each["score"] for each in found}
            assert got == pytest.approx(pieces, abs=1e-4)
        elif kind == "tagger":
            first = [each["entity"] for each in found if not each["word"].startswith("##")]
            assert first == [word["tag"] for word in answer["words"]]
        else:
            got = {each["label"]: each["score"] for each in found}
            assert got == pytest.approx(answer["probabilities"], abs=1e-4)
