"""Other programs run exports and students: browsers, Node, and the libraries of the guide.

- An export finds lines in a browser: transformers.js in a headless Chromium, from local files.
- Exports of every task run in Node: transformers.js, with examples/run_export.mjs.
- The libraries that docs/guide/serve.md names load a student's folder, or its export.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.browser import opened
from tests.docs.pages import blocks_of
from tests.making.environment import borrowing_python, printed_by
from tests.making.models import Teachers
from tests.student_export.test_export import (
    EXAMPLE,
    TEXTS,
    UNMEASURED,
    by_example,
    embedder,
    run,
    shallow,
)
from tests.student_predict.test_predict import answers, close

TRANSFORMERS_JS = "@huggingface/transformers@4.3.1"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.apart
def test_it_finds_lines_in_a_browser(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """A search in a browser finds lines. `apart`, as it fetches transformers.js from npm."""
    npm = shutil.which("npm") or pytest.skip("needs npm")
    site, modules = tmp_path / "site", tmp_path / "node_modules"
    site.mkdir()
    words = ("install", "--ignore-scripts", "--no-audit", "--no-fund", TRANSFORMERS_JS)
    subprocess.run([npm, *words], cwd=tmp_path, check=True, capture_output=True)
    (site / "transformers").symlink_to(modules / "@huggingface/transformers/dist")
    (site / "onnxruntime").symlink_to(modules / "onnxruntime-web/dist")
    shutil.copy(EXAMPLE.with_suffix(".html"), site / "index.html")
    student = embedder(tiny_teacher("bert"), tmp_path / "student")
    for dtype, more in (("fp32", ()), ("q8", ("--quantize", "int8", "--least", "0.5"))):
        shutil.rmtree(site / "model", ignore_errors=True)
        assert run(student, "--to", "onnx", *more, "--out", site / "model").exit_code == 0
        wanted = by_example(site / "model", *TEXTS)
        with served(site) as address, opened(f"{address}?dtype={dtype}") as page:
            page.wait_for_selector("#go:enabled")
            found = np.array(page.evaluate("texts => embed(texts)", TEXTS))
            assert np.abs(found - wanted).max() < 1e-3
            page.fill("#question", TEXTS[0])
            page.fill("#lines", "\n".join(TEXTS))
            page.click("#go")
            assert page.wait_for_selector("#found li").inner_text() == f"1.000 {TEXTS[0]}"
            assert page.locator("#found li").count() == len(TEXTS)


CLASSES = ("good", "bad", "so")
NODE_TEXTS: tuple[str, ...] = ("the old lamp", "moss")
KINDS: dict[str, tuple[Any, str, tuple[str, ...], tuple[str, ...]]] = {
    "mlm": (AutoModelForMaskedLM, "mlm", (), ("the [MASK] lamp",)),
    "classifier": (AutoModelForSequenceClassification, "classification", CLASSES, NODE_TEXTS),
    "several labels": (AutoModelForSequenceClassification, "classification", CLASSES, NODE_TEXTS),
    "reranker": (AutoModelForSequenceClassification, "classification", ("LABEL_0",), ("a\tmoss",)),
    "tagger": (AutoModelForTokenClassification, "tagging", ("DET", "ADJ", "NOUN"), NODE_TEXTS),
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
    return [json.loads(line) for line in printed_by("node", script, folder, *texts).splitlines()]


@pytest.mark.apart
@pytest.mark.parametrize("kind", [*KINDS, "embedder"])
def test_node_answers_as_student_predict(
    kind: str, script: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node has the results of student-predict. `apart`, as it fetches transformers.js from npm."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    student, texts = tmp_path / "student", NODE_TEXTS
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


__all__ = ["shallow"]  # the fixture
PAGE = "docs/guide/serve.md"
SERVED = ("A text.", "Another text.")


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

    return SentenceTransformer(str(student), device="cpu").encode(list(SERVED))


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
    assert np.allclose(made.embed_documents(list(SERVED)), vectors_of(student), atol=1e-6)


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
    student: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        ("classes", classes.replace("A text.", SERVED[0]), "printed"),
        ("tags", tags, "printed"),
    ]
    older = ("datasets<5", "sentence-transformers<6", "transformers<5")
    packages = (*older, "langchain-huggingface", "optimum-onnx[onnxruntime]")
    python = borrowing_python(tmp_path / "venv", *packages)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    given = json.dumps([(str(tmp_path / folder), code, name) for folder, code, name in asked])
    printed = printed_by(python, "-c", FOREIGN, given=given)
    version, *vectors, labelled, tagged = json.loads(printed.splitlines()[-1])
    assert version.startswith("4.")
    for found in vectors:
        assert np.allclose(found, vectors_of(student), atol=1e-4)
    (own,) = answers(folders["classes"], SERVED[0])
    best = own["probabilities"][own["label"]]
    assert close(labelled, [{"label": own["label"], "score": best}])
    (own,) = answers(folders["tags"], SERVED[0])
    first = [each["entity"] for each in tagged if not each["word"].startswith("##")]
    assert first == [word["tag"] for word in own["words"]]
