"""The examples that train run unchanged, on small stores of real teachers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce import StudentBatches, prepare
from teachonce.store import open_store
from tests.examples.loading import example
from tests.making.dumps import dumped, write_corpus
from tests.making.sentence_folders import modules, normalize, pooling


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[..., Path]) -> str:
    folder = tmp_path_factory.mktemp("examples")
    corpus = write_corpus(folder / "corpus.txt", 60)
    return str(dumped(tiny_teacher("bert"), corpus, folder / "a.zarr"))


def test_a_plain_loop(tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    last = example("plain_loop").train(tokens, str(tmp_path), "400", 32)
    printed = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 3 and printed[0] > printed[1] > printed[2] == round(last, 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    student = AutoModelForMaskedLM.from_pretrained(tmp_path)
    found = student(**tokenizer("The stories were long.", return_tensors="pt")).logits
    assert found.shape[2] == len(tokenizer) == 400


def test_the_trainer_of_transformers(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    losses = example("transformers_trainer").train(tokens, str(tmp_path), "400", epochs=4)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.hidden_size == 64


def test_a_module_and_a_loss_of_your_own(tokens: str, tmp_path: Path) -> None:
    losses = example("own_student").train(tokens, str(tmp_path / "a.pt"), "400", epochs=4)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert torch.load(tmp_path / "a.pt")["embeddings.weight"].shape == (400, 64)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Callable[..., Path]) -> str:
    folder = tmp_path_factory.mktemp("vectors")
    base = tiny_teacher("bert")
    teacher = modules(pooling("mean"), normalize(), base=base, folder=folder / "teacher")
    made: dict[str, Any] = {"head": "embedding", "logits": "none", "hidden": "none"}
    return str(dumped(teacher, write_corpus(folder / "c.txt", 40), folder / "v.zarr", **made))


@pytest.mark.slow
def test_a_trainer_of_sentence_transformers(
    vectors: str, tiny_teacher: Callable[..., Path], tmp_path: Path
) -> None:
    train = example("sentence_transformers_trainer").train
    train(vectors, str(tiny_teacher("electra")), str(tmp_path), epochs=5, batch=8)
    with open_store(vectors) as opened:
        texts, wanted = list(opened.texts()), opened.embeddings()
    found = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    assert found.shape == wanted.shape
    assert (found * wanted).sum(axis=1).mean() > 0.6  # cosines: both have length 1


def test_a_loop_over_vectors_of_texts(vectors: str) -> None:
    batches = StudentBatches(vectors, "400", student="32x1x2", held_out=0.1)
    assert batches.options.loss == {"embedding": 1.0, "similarity": 10.0}
    assert batches.options.batch_texts == 128
    student = prepare(batches.options, batches.store)[0]
    distiller, batch = batches.distiller(student), next(iter(batches))
    losses = distiller(batch)
    assert list(losses) == ["embedding", "similarity"] and distiller.weighted(losses).requires_grad
    own, teacher = distiller.sides(batch).of("embedding")[0]
    assert own.shape == teacher.shape and distiller.vector_head is not None
