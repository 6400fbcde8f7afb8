"""The libraries that docs/guide/serve.md names load a student's folder, or its export."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import blocks_of
from tests.making.environment import borrowing_python
from tests.student_export.test_export import UNMEASURED, embedder, run, shallow
from tests.student_predict.test_predict import answers, close

Teacher = Callable[..., Path]
__all__ = ["shallow"]  # the fixture
PAGE = "docs/guide/serve.md"
TEXTS = ("A text.", "Another text.")


def block(of: str) -> str:
    """Return the page's block of code that imports from a module."""
    (code,) = (each.text for each in blocks_of(PAGE) if f"from {of} import" in each.text)
    return code


@pytest.fixture
def student(shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a student of vectors with a default prompt; its folder is `student`, as on the page."""
    monkeypatch.chdir(tmp_path)
    return embedder(shallow, tmp_path / "student")


def vectors_of(student: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(student), device="cpu").encode(list(TEXTS))


def test_llama_index(student: Path) -> None:
    pytest.importorskip("llama_index.embeddings.huggingface")
    names: dict[str, Any] = {}
    exec(
        block("llama_index.embeddings.huggingface").replace('prompt = ""', 'prompt = "old "'), names
    )
    assert np.allclose(names["vector"], vectors_of(student)[0], atol=1e-6)


def test_langchain(student: Path) -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    made = langchain.HuggingFaceEmbeddings(model_name=str(student))
    assert np.allclose(made.embed_documents(list(TEXTS)), vectors_of(student), atol=1e-6)


FOREIGN = """
import json, sys
import transformers
found = [transformers.__version__]
for folder, code, name in json.load(sys.stdin):
    import os
    os.chdir(folder)
    names = {"print": lambda value: names.update(printed=value)}
    exec(code, names)
    value = names[name]
    found.append(value.tolist() if hasattr(value, "tolist") else value)
print(json.dumps(found, default=float))
"""


@pytest.mark.apart
def test_the_page_runs_with_optimum(
    student: Path, tiny_teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's code runs with Optimum. `apart`, as Optimum needs transformers 4, in a separate
    environment."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    folders = {
        "vectors": student,
        "classes": tiny_teacher("bert", "classification", ("good", "bad", "so")),
        "tags": tiny_teacher("distilbert", "tagging", ("DET", "NOUN", "VERB")),
    }
    for name, folder in folders.items():
        made = run(folder, "--to", "onnx", "--out", tmp_path / name / "ready")
        assert made.exit_code == 0, made.output
    classes = block("optimum.onnxruntime")
    tags = classes.replace("SequenceClass", "TokenClass").replace("text-class", "token-class")
    _, _, card = (tmp_path / "vectors/ready/README.md").read_text().partition("from sentence_tr")
    readme = f"from sentence_tr{card.partition('```')[0]}"
    asked = [
        ("vectors", block("sentence_transformers"), "vectors"),
        ("vectors", block("langchain_huggingface"), "vectors"),
        ("vectors/ready", readme, "printed"),
        ("classes", classes.replace("A text.", TEXTS[0]), "printed"),
        ("tags", tags, "printed"),
    ]
    older = ("datasets<5", "sentence-transformers<6", "transformers<5")
    packages = (*older, "langchain-huggingface", "optimum-onnx[onnxruntime]")
    python = borrowing_python(tmp_path / "venv", *packages)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    given = json.dumps([(str(tmp_path / folder), code, name) for folder, code, name in asked])
    done = subprocess.run([python, "-c", FOREIGN], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, *vectors, labelled, tagged = json.loads(done.stdout.splitlines()[-1])
    assert version.startswith("4.")
    for found in vectors:
        assert np.allclose(found, vectors_of(student), atol=1e-4)
    (own,) = answers(folders["classes"], TEXTS[0])
    best = own["probabilities"][own["label"]]
    assert close(labelled, [{"label": own["label"], "score": best}])
    (own,) = answers(folders["tags"], TEXTS[0])
    first = [each["entity"] for each in tagged if not each["word"].startswith("##")]
    assert first == [word["tag"] for word in own["words"]]
