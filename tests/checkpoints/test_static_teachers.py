"""Tables of word vectors as teachers give the vectors of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model2vec import StaticModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import EmbeddingSpec, open_store
from teachonce.student_export.formats.model2vec import write_float
from teachonce.student_export.loaded_student import load_student
from teachonce.student_train.cli import main as student_train
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.checkpoints.test_text_vectors import VECTORS, library, texts_of
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped
from tests.making.models import Tokenizers
from tests.making.sentence_folders import PROMPTS, changed, dense, normalize
from tests.making.texts import ENGLISH


def saved(make_tokenizer: Tokenizers, kind: str, folder: Path, **settings: Any) -> Path:
    """Save a folder of a StaticEmbedding, a Dense and a Normalize with vectors of 12 numbers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tokenizer = make_tokenizer(kind).backend_tokenizer
        words = StaticEmbedding(tokenizer, embedding_dim=8)
    parts = [words, dense(8, 12), normalize()]
    made = SentenceTransformer(modules=parts, device="cpu", **settings)
    made.save(str(folder), create_model_card=False)
    return folder


def like_model2vec(folder: Path) -> Path:
    """Convert a folder to the names and files that Model2Vec writes: a row for several pieces,
    weights of pieces, half precision, a path of `.` and a config.json of its own."""
    weights = load_file(folder / "model.safetensors")["embedding.weight"]
    mapping = torch.arange(len(weights)) // 2
    weight = torch.linspace(0.1, 2, len(weights), dtype=torch.float64)
    tensors = {"embeddings": weights[::2].half(), "mapping": mapping, "weights": weight}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    listed = json.loads((folder / "modules.json").read_text())
    listed[0] |= {"path": ".", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps(listed))
    fields: dict[str, Any] = {
        "architectures": ["StaticModel"],
        "hidden_dim": 8,
        "seq_length": 1000000,
    }
    return changed(folder, "config.json", model_type="model2vec", normalize=True, **fields)


@pytest.mark.parametrize("kind", ("wordpiece", "bpe", "unigram"))
@pytest.mark.parametrize("model2vec", (False, True))
def test_word_vectors_are_a_teacher(
    make_tokenizer: Tokenizers, tmp_path: Path, kind: str, model2vec: bool
) -> None:
    settings = {"prompts": PROMPTS, "default_prompt_name": "query", "truncate_dim": 9}
    folder = saved(make_tokenizer, kind, tmp_path / "m", **settings)
    if model2vec:
        like_model2vec(folder)
    corpus = texts_of(tmp_path / "a.txt")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    assert np.allclose(store.embeddings(), library(folder, list(ENGLISH[:12])), atol=1e-6)
    assert store.features.embedding == EmbeddingSpec(9, "mean, dense 12 Tanh, first 9", "find: ")
    assert not any(record.special.any() for record in store)
    teacher = load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert teacher.weights_hash() == store.identity["teacher"]["weights_hash"]
    assert not teacher.notes
    changed(folder, "config_sentence_transformers.json", swirl=0.5)
    teacher = load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert "config_sentence_transformers.json: swirl: not in the list" in teacher.notes[0]


@pytest.mark.parametrize("side", ("right", "left"))
def test_texts_are_truncated_as_by_the_tokenizer_of_the_folder(
    make_tokenizer: Tokenizers, tmp_path: Path, side: str
) -> None:
    """A StaticEmbedding that was made from a transformer's tokenizer often has its truncation."""
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(5, direction=side)
    made.save(str(folder / "tokenizer.json"))
    corpus, texts = texts_of(tmp_path / "a.txt"), list(ENGLISH[:12])
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **VECTORS))
    wanted = library(folder, texts)
    assert all(len(record.token_ids) <= 5 for record in store)
    if side == "left":  # a dump begins at the next word
        read = zip(texts, (record.text for record in store), strict=True)
        assert all(text.endswith(part) and text != part for text, part in read)
    else:
        assert np.allclose(store.embeddings(), wanted, atol=1e-6)
    with pytest.raises(UserError, match="at most 5 tokens"):
        dumped(folder, corpus, tmp_path / "b.zarr", **VECTORS, max_length=6)
    student = load_student(folder)
    assert np.allclose(student.run(student.encode(texts)), wanted, atol=1e-6)
    about = json.loads((tmp_path / "m" / "modules.json").read_text())[:1]
    (folder / "modules.json").write_text(json.dumps(about))  # model2vec has no Dense with Tanh
    (tmp_path / "x").mkdir()
    if side == "left":
        with pytest.raises(UserError, match="leaves out the start of a long text"):
            write_float(load_student(folder), tmp_path / "x" / "model.safetensors")
        return
    write_float(load_student(folder), tmp_path / "x" / "model.safetensors")
    # Its `encode` also cuts long texts by their characters, before it tokenizes them.
    assert StaticModel.from_pretrained(tmp_path / "x").max_length == 5


def test_a_student_is_trained_on_word_vectors(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    corpus, store = texts_of(tmp_path / "a.txt"), tmp_path / "a.zarr"
    words = ("--model", folder, "--corpus", corpus, "--device", "cpu")
    ok(teacher_dump, *words, "--head", "embedding", "--out", store)
    says(ok(feature_store, "verify", store, "--model", folder), "sound")
    ok(
        *(student_train, "--store", store, "--vocab", "450", "--student", "static:8"),
        *("--steps", "4", "--batch-texts", "6", "--device", "cpu", "--out", tmp_path / "s"),
    )
    assert library(tmp_path / "s", ["The old"]).shape == (1, 12)
    again = open_store(dumped(tmp_path / "s", corpus, tmp_path / "b.zarr", **VECTORS))
    assert np.allclose(again.embeddings(), library(tmp_path / "s", list(ENGLISH[:12])), atol=1e-6)
    line = refused(teacher_dump, *words, "--out", tmp_path / "c.zarr")
    assert "a table of word vectors, which gives only vectors of texts; add --head embed" in line
    for feature in ("--hidden", "--attention"):
        line = refused(
            *(teacher_dump, *words, "--head", "embedding", feature, "mean"),
            *("--out", tmp_path / "c.zarr"),
        )
        assert "has no hidden states and no attention maps; give --hidden none --att" in line


def test_a_static_student_reads_whole_texts(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    """A tokenizer of a transformer often has a truncation, which a StaticEmbedding would apply."""
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    store = dumped(folder, texts_of(tmp_path / "a.txt"), tmp_path / "a.zarr", **VECTORS)
    make_tokenizer("wordpiece").save_pretrained(tmp_path / "v")
    made = Tokenizer.from_file(str(tmp_path / "v" / "tokenizer.json"))
    made.enable_truncation(5)
    made.save(str(tmp_path / "v" / "tokenizer.json"))
    ok(
        *(student_train, "--store", store, "--vocab", tmp_path / "v", "--student", "static:8"),
        *("--steps", "1", "--device", "cpu", "--out", tmp_path / "s"),
    )
    assert Tokenizer.from_file(str(tmp_path / "s" / "tokenizer.json")).truncation is None
    short, long = library(tmp_path / "s", [ENGLISH[0], f"{ENGLISH[0]} {ENGLISH[1]}"])
    assert not np.allclose(short, long, atol=1e-4)


def test_a_damaged_table_is_one_line(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    folder = saved(make_tokenizer, "wordpiece", tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot load its StaticEmbedding: .*copy the whole") as e:
        load_teacher(str(folder), head="embedding", hidden="none", attention="none")
    assert "\n" not in str(e.value)
