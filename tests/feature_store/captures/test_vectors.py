"""Vectors in files of sentence-transformers and datasets become stores, and stores become such
files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import datasets
import numpy as np
import pytest

from teachonce.checkpoints import names as checkpoint_names
from teachonce.store import open_store
from teachonce.student_train.plan.vector_space import inherited_settings
from tests.feature_store.captures.conftest import imported, refused, run
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.sentence_folders import modules, normalize, pooling
from tests.making.texts import ENGLISH


@pytest.fixture(scope="module")
def cached(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts with a teacher's vectors as labels, as a distillation script does."""
    from sentence_transformers import SentenceTransformer

    folder = tmp_path_factory.mktemp("vectors")
    modules(pooling("mean"), normalize(), base=tiny_teacher("bert"), folder=folder / "teacher")
    model = SentenceTransformer(str(folder / "teacher"), device="cpu")
    texts = datasets.Dataset.from_dict({"sentence": [*ENGLISH, ""], "source": [0] * 13})
    made = texts.map(
        lambda batch: {"label": model.encode(batch["sentence"])}, batched=True, batch_size=8
    )
    made.save_to_disk(str(folder / "cached"))
    return folder


def test_cached_vectors(cached: Path, tmp_path: Path) -> None:
    said = imported(cached / "cached", tmp_path / "a.zarr", cached / "teacher", "--codec", "exact")
    assert "13 samples, vectors of width 32, of length 1" in said
    store, made = open_store(tmp_path / "a.zarr"), datasets.load_from_disk(str(cached / "cached"))
    assert len(store) == 12  # the empty text has no token
    for record in store:
        row = made[record.document]
        assert record.text == row["sentence"]
        assert np.abs(record.embedding - np.array(row["label"])).max() < 1e-6


def test_a_tokenizer_is_named_as_a_model_of_teacher_dump(
    cached: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by its alias, from an installed package instead of the hub."""
    folder = tiny_teacher("bert")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(checkpoint_names, "_minilm_package", lambda: folder)
    monkeypatch.setattr(checkpoint_names, "MINILM_SHA256", digest)
    imported(cached / "cached", tmp_path / "a.zarr", "minilm")
    assert open_store(tmp_path / "a.zarr").identity["teacher"]["id"] == "minilm"
    line = refused("import", cached / "cached", tmp_path / "b.zarr", "--tokenizer", "me/gone")
    assert "--tokenizer: model 'me/gone': no such folder, not cached, and the hub" in line


def test_imported_vectors_are_compared_with_their_teacher(
    tiny_teacher: Teachers, cached: Path, tmp_path: Path
) -> None:
    """`verify --model` compares imported vectors with their teacher's; a prompt that `export`
    leaves out of the texts is given to `import`."""
    teacher = modules(
        *(pooling("mean"), normalize()),
        base=tiny_teacher("bert"),
        folder=tmp_path / "teacher",
        prompts={"query": "the moss ", "none": ""},
        default_prompt_name="query",
    )
    corpus = tmp_path / "texts.txt"
    corpus.write_text("\n".join(ENGLISH) + "\n", "utf-8")
    for name, start in (("query", "the moss "), ("none", "")):
        store, labels, again = (tmp_path / f"{name}{end}" for end in (".zarr", "", ".h5"))
        options = {"head": "embedding", "hidden": "none", "attention": "none", "prompt": name}
        dumped(teacher, corpus, store, logits=None, codec="exact", **options)
        said = run("export", store, labels, "--to", "sentence-transformers").output
        assert "Map" not in said and (f"prompts={start!r}" in said) == bool(start)
        words = ("--codec", "exact", "--prompt", start)
        imported(labels, again, teacher, *words)
        assert open_store(again)[3].text == open_store(store)[3].text
        # What a student inherits: prompts and similarity.
        one, other = (inherited_settings([open_store(path)]) for path in (store, again))
        assert one == other and one["prompts"]["query"] == "the moss "
        done = run("verify", again, "--model", teacher, "--device", "cpu")
        assert done.exit_code == 0 and "every error is within" in done.output, done.output
    plain = cached / "teacher"
    line = refused("verify", tmp_path / "query.h5", "--model", plain)
    assert "has no prompt 'the moss ', with which the texts of" in line
    line = refused("verify", tmp_path / "query.zarr", "--model", plain)
    assert "Spec(" not in line


def test_vectors_of_truncated_texts_are_not_compared(cached: Path, tmp_path: Path) -> None:
    """A vector is of the whole text, and a store may have only its beginning."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(cached / "teacher"), device="cpu")
    for name, texts in (("one", ["the lamp", " ".join(ENGLISH)]), ("none", [" ".join(ENGLISH)])):
        rows = {"sentence": texts, "label": model.encode(texts).tolist()}
        datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / name))
        imported(tmp_path / name, tmp_path / f"{name}.h5", cached / "teacher", "--max-length", 40)
    words = ("--model", cached / "teacher", "--device", "cpu")
    done = run("verify", tmp_path / "one.h5", *words)
    assert done.exit_code == 0, done.output
    assert "1 sequence, " in done.output and "1 sequence left out" in done.output
    line = refused("verify", tmp_path / "none.h5", *words)
    assert "none.h5: 1 sequence drawn, and each may lack a part of the text" in line


def test_a_store_of_vectors_becomes_labels(cached: Path, tmp_path: Path) -> None:
    """Imported again, it is the same except for the name of the source."""
    first, again = tmp_path / "a.zarr", tmp_path / "b.zarr"
    imported(cached / "cached", first, cached / "teacher", "--codec", "exact")
    assert run("export", first, tmp_path / "labels", "--to", "sentence-transformers").exit_code == 0
    made = datasets.load_from_disk(str(tmp_path / "labels"))
    assert made.column_names == ["sentence", "label"] and not (tmp_path / "labels/.rows").exists()
    imported(tmp_path / "labels", again, cached / "teacher", "--codec", "exact")
    for one, other in zip(open_store(first), open_store(again), strict=True):
        assert one.text == other.text and np.array_equal(one.embedding, other.embedding)
