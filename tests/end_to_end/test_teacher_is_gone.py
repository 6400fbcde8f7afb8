"""Students are made from the store alone: the teacher's folder is deleted, the network off."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from tests.end_to_end.support import STUDENT, ok, start
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, Tokenizers

TEXT = "The old lighthouse keeper {} the stairs every evening."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers) -> Path:
    folder = tmp_path_factory.mktemp("gone")
    teacher = Path(shutil.copytree(tiny_teacher("distilbert"), folder / "teacher"))
    out = dumped(teacher, write_corpus(folder / "corpus.txt"), folder / "store.h5", max_length=64)
    shutil.rmtree(teacher)
    (folder / "corpus.txt").unlink()
    return out


def check_student(out: Path, vocabulary: int) -> None:
    """Check that a folder is an ordinary transformers folder."""
    model = AutoModelForMaskedLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer) == vocabulary
    assert not list(out.glob("**/*.pt"))
    fill = pipeline("fill-mask", model=str(out))
    found = fill(TEXT.format(tokenizer.mask_token))
    assert len(found) == 5 and all(0 < guess["score"] <= 1 for guess in found)
    card = (out / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card and "valid_mlm" in card


@pytest.mark.slow
def test_as_a_user_would(tmp_path: Path, store: Path) -> None:
    words = ("--store", store, "--vocab", 400, "--out", tmp_path / "student", *STUDENT)
    loss = ("--steps", 3, "--loss", "mlm=1,kl=1,hidden=1,attention=1")
    process = start("teachonce.student_train.cli", *words, *loss)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    check_student(tmp_path / "student", 400)


def test_initialisation(tmp_path: Path, store: Path) -> None:
    """The saved weights are the initial ones, as the rate is tiny."""
    out = tmp_path / "student"
    words = ("--store", store, "--vocab", "teacher", "--init", "layers:2,4", "--out", out, *STUDENT)
    said = ok(student_train, *words, "--student", "bert:32x2x4", "--steps", "1", "--lr", "1e-12")
    model: Any = AutoModelForMaskedLM.from_pretrained(out)
    weights = open_store(store).teacher_weights()
    words = model.get_input_embeddings().weight.detach().numpy()
    taught = np.asarray(weights["embeddings.word_embeddings.weight"], np.float32)
    check_student(out, len(taught))
    first = model.bert.encoder.layer[0].output.dense.weight.detach().numpy()
    second = np.asarray(weights["transformer.layer.1.ffn.lin2.weight"], np.float32)
    np.testing.assert_allclose(words, taught, atol=1e-4)
    np.testing.assert_allclose(first[:, : second.shape[1]], second, atol=1e-4)
    assert "cut to 32" in said


def test_vocabulary_of_a_folder(tmp_path: Path, store: Path, make_tokenizer: Tokenizers) -> None:
    """Byte-level pieces against the teacher's WordPiece."""
    tokenizer = make_tokenizer("bpe")
    tokenizer.save_pretrained(tmp_path / "bpe")
    for align in ("span", "match", "reduce"):
        out = tmp_path / align
        words = ("--store", store, "--vocab", tmp_path / "bpe", "--out", out, *STUDENT)
        ok(student_train, *words, "--align", align, "--steps", "2", "--loss", "mlm,kl,hidden")
        check_student(out, len(tokenizer))
