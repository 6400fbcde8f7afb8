"""An export runs without torch and agrees with its student; otherwise it is refused."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from harness.processes import command, finish, fork
from teachonce.checkpoints.bilstm import BiLstmConfig, BiLstmForTokenClassification
from teachonce.downstream.tasks.sts import SentenceSimilarity
from teachonce.student_export.cards import STUDENT, Exported, write_card
from teachonce.student_export.checking import export_check, random_texts
from teachonce.student_export.cli import main
from teachonce.student_export.costs import Costs, costs_of, export_size
from teachonce.student_export.formats import onnx
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.job import export
from teachonce.student_export.loaded_student import load_student
from teachonce.student_export.options import FORMATS as SUPPORT
from teachonce.student_export.options import ExportOptions
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.checkpoints.test_embedders import static
from tests.downstream.support import classified, table, write_tagged
from tests.downstream.tasks.test_tasks import alike
from tests.end_to_end.support import refused as refused_by
from tests.end_to_end.test_resume import last_line, wait_for
from tests.hub_contents import wrong_in_card
from tests.making.environment import printed_by
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import dense, modules, normalize, pooling

TEXTS = ["the lamp", "the keeper of the old tower read letters by the light of a lamp", "moss"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "run_export.py"
ALONE = """
import sys
for name in ("torch", "transformers", "sentence_transformers", "student_export"):
    sys.modules[name] = None
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


refused = partial(refused_by, main)


def by_example(folder: Path, *texts: str) -> Array:
    """Run the example in a process that can import neither torch nor this project."""
    words = [sys.executable, "-c", ALONE, str(EXAMPLE), str(folder), *texts]
    rows = json.loads(printed_by(*words))
    if "labels" in (about := json.loads((folder / "export.json").read_text())):
        assert rows["labels"] == about["labels"]
        rows = rows["logits"]
    return np.array(rows)


@pytest.fixture(scope="module")
def shallow(tiny_teacher: Teachers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cut a teacher to its first layer, as torch's export time grows with the number of layers."""
    folder, bert = tmp_path_factory.mktemp("shallow"), tiny_teacher("bert")
    AutoModelForMaskedLM.from_pretrained(bert, num_hidden_layers=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return folder


def embedder(base: Path, folder: Path) -> Path:
    parts = (pooling("mean"), dense(32, 16), normalize())
    settings = {"prompts": {"all": "old "}, "default_prompt_name": "all"}
    return modules(*parts, base=base, folder=folder, **settings)


def bilstm(make_tokenizer: Tokenizers, folder: Path) -> Path:
    tokenizer = make_tokenizer("wordpiece")
    torch.manual_seed(0)
    model = BiLstmForTokenClassification(
        BiLstmConfig(
            vocab_size=len(tokenizer),
            embedding_size=16,
            lstm_size=12,
            num_hidden_layers=2,
            id2label=dict(enumerate(("DET", "ADJ", "NOUN", "VERB"))),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


UNMEASURED = Costs(bytes=1, load_s=1.0, sentence_ms=1.0, per_second=1.0, memory=None)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the timing of exports: its two processes, which import torch again, take half of an
    export, and other tests check the figures."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)


POOLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several": ({"mode": ("mean", "cls", "lasttoken")}, {}),
    "without the prompt": ({"mode": ("weightedmean", "max"), "include_prompt": False}, {}),
    "cut": ({"mode": "mean"}, {"truncate_dim": 8}),
    "cls": ({"mode": "cls"}, {}),
    "mean": ({"mode": "mean"}, {}),
    "max": ({"mode": "max"}, {}),
}
SINGLE = ("cls", "mean", "max")  # a mode alone is apart: each of them is among the others


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.apart] * (name in SINGLE)) for name in POOLINGS]
)
def test_every_pooling_is_exported(shallow: Path, tmp_path: Path, name: str) -> None:
    """Every pooling is exported: vectors equal the library's, for any number and length of
    texts."""
    from sentence_transformers import SentenceTransformer

    mode, settings = POOLINGS[name]
    prompt = {"prompts": {"all": "old "}, "default_prompt_name": "all"}
    folder = modules(pooling(**mode), base=shallow, folder=tmp_path / "m", **settings, **prompt)
    result = run(folder, "--to", "onnx", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.allclose(by_example(tmp_path / "out", *TEXTS), expected, atol=1e-4)


@pytest.mark.slow
def test_sentence_vectors_run_alone_in_int8(shallow: Path, tmp_path: Path) -> None:
    """Tokenizer, prompt, pooling and dense layer are in the folder; both cards have the figures."""
    from sentence_transformers import SentenceTransformer

    folder, out = embedder(shallow, tmp_path / "student"), tmp_path / "out"
    head = 'license: "mit"\nlanguage: ["en"]\nbase_model: a/b\nbase_model_relation: finetune\n'
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n{head}---\n\n# Mine\n")
    model = SentenceTransformer(str(folder), device="cpu")
    read = SentenceSimilarity().read(alike(tmp_path / "read.tsv", 24, 0))
    sides = [model.encode([getattr(row, side) for row in read]) for side in ("text_a", "text_b")]
    rows = zip(read, (sides[0] * sides[1]).sum(1), strict=True)
    scored = [(row.text_a, row.text_b, cosine) for row, cosine in rows]
    check = table(tmp_path / "pairs.tsv", "text_a text_b score", scored)
    words = ("--to", "onnx", "--quantize", "int8", "--check", check, "--least", 0.8)
    result = run(folder, *words, "--out", out)
    assert result.exit_code == 0, result.output
    assert "% of the student's score (Spearman of sts on pairs.tsv)" in result.stdout
    assert "agreement" not in result.stdout
    expected = model.encode(TEXTS)
    found = by_example(out, *TEXTS)
    assert (found * expected).sum(1) == pytest.approx(1, abs=0.02)
    about = json.loads((out / "export.json").read_text())
    (made,) = about["files"]
    assert about["kind"] == "embedding" and made["what"] == "Spearman of sts on pairs.tsv"
    assert made["figures"]["bytes"] == (out / made["file"]).stat().st_size
    # The files for sentence-transformers with backend="onnx", Optimum and transformers.js.
    graph = onnxruntime.InferenceSession(str(out / made["file"]))
    outputs = {each.name for each in graph.get_outputs()}
    assert outputs == {"last_hidden_state", "sentence_embedding"}
    modules = json.loads((out / "modules.json").read_text())
    kinds = [each["type"].rpartition(".")[2] for each in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert all((out / each["path"]).is_dir() for each in modules)
    card_of_export = ModelCard.load(out / "README.md")
    assert card_of_export.data["license"] == "mit" and card_of_export.data.library_name is None
    assert not wrong_in_card({"content": str(card_of_export)})
    for card in (out / "README.md", folder / "README.md"):
        written = card.read_text()
        assert "float32, torch" in written and "`onnx/model_quantized.onnx`" in written
    assert [path.name for path in (out / "onnx").iterdir()] == ["model_quantized.onnx"]
    assert "exists already" in refused(folder, "--to", "onnx", "--out", out)


@pytest.mark.usefixtures("unmeasured")
def test_a_bilstm_runs_alone_and_a_second_export_joins_the_table(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    folder = bilstm(make_tokenizer, tmp_path / "student")
    record = "`training.json` has all of these values in full.\n"
    (folder / "README.md").write_text(f"# Mine\n\nWords of mine.\n{record}")
    check = write_tagged(tmp_path / "tags.tsv", 12, 0)
    first = run(folder, "--to", "onnx", "--check", check, "--out", tmp_path / "out")
    assert first.exit_code == 0, first.output
    made = json.loads((tmp_path / "out" / "export.json").read_text())["files"][0]
    exported = (tmp_path / "out" / "README.md").read_text()
    assert record not in exported and "Words of mine." in exported  # it is in the student's folder
    figures = Costs(**made["figures"])
    second = Exported("torchscript/model.pt", "as much", 0.995, None, figures)
    own = Exported(STUDENT, "as much", 1.0, None, figures)
    write_card((folder / "README.md").read_text(), own, [second], folder / "README.md")
    card = (folder / "README.md").read_text()
    assert card.startswith(f"# Mine\n\nWords of mine.\n{record}")
    assert card.count("## Exports") == 1 and card.count("float32, torch") == 1
    rows = {line.split(" | ")[0]: line.split(" | ")[2:4] for line in card.splitlines()}
    score = f"{100 * made['score']:.2f}"  # the student's own, as the export's agreement is 1
    assert made["keeps"] == 1 and float(score) > 0
    same = ["100.00 % (macro F1 of pos on tags.tsv)", score]
    assert rows["| float32, torch"] == rows["| `onnx/model.onnx`"] == same
    assert rows["| `torchscript/model.pt`"] == ["99.50 % (as much)", ""]
    assert [line[:9] for line in card.splitlines() if line[:1] == "|"] == [
        "| file | ",
        "|---|---|",
        "| float32",
        "| `onnx/m",
        "| `torchs",
    ]
    assert "`onnx/model.onnx`" in card and "`torchscript/model.pt`" in card
    again = run(folder, "--to", "torchscript", "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    table = (tmp_path / "again" / "README.md").read_text().partition("## Exports")[2]
    assert "`torchscript/model.pt`" in table and "onnx" not in table  # from another folder
    assert f"| {score} |" in table  # as the student was scored with the first export
    assert "`onnx/model.onnx`" in (folder / "README.md").read_text()
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = model(inputs["input_ids"], inputs["attention_mask"]).logits.numpy()
    found = by_example(tmp_path / "out", *TEXTS)
    present = inputs["attention_mask"].numpy().astype(bool)
    assert found[present] == pytest.approx(expected[present], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["mlm", "static", pytest.param("classification", marks=pytest.mark.apart)]
)
def test_other_kinds_agree_at_any_size(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """Exports agree at batch sizes and lengths that the exporter has not traced."""
    labels = ("a", "b", "c")
    made = {
        "mlm": lambda: tiny_teacher("bert"),
        "classification": lambda: tiny_teacher("distilbert", "classification", labels),
        "static": lambda: static(make_tokenizer, tmp_path / "static"),
    }
    student = load_student(made[kind]())
    path = tmp_path / "model.onnx"
    onnx.write_float(student, path)
    found = onnx.open_runner(path, student.output)
    for texts in (TEXTS, TEXTS[:1], [" ".join(TEXTS * 5)]):
        inputs = student.encode(texts)
        expected, got = student.run(inputs), found(inputs)
        if kind == "mlm":
            present = inputs["attention_mask"].astype(bool)
            expected, got = expected[present], got[present]
        assert got == pytest.approx(expected, abs=2e-4)
    assert export_check(student, None).share(found) > 0.999
    eighth = tmp_path / "int8.onnx"
    parts = [part for some in onnx.layers(path).values() for part in some]
    onnx.quantise(path, eighth, "int8", parts)
    assert eighth.stat().st_size < 0.75 * path.stat().st_size


def test_word_vectors_are_cut_as_the_folder_says(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = static(make_tokenizer, tmp_path / "static")
    path = folder / "config_sentence_transformers.json"
    cut = {"truncate_dim": 4, "prompts": {"all": "old "}, "default_prompt_name": "all"}
    path.write_text(json.dumps(json.loads(path.read_text()) | cut))
    student = load_student(folder)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert expected.shape[1] == 4
    assert np.allclose(student.run(student.encode(TEXTS)), expected, atol=1e-6)


@pytest.mark.usefixtures("unmeasured")
def test_a_loss_is_refused_and_its_layers_are_named(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """A refused export leaves no file. The card names the layers that are in float32."""
    folder, out = bilstm(make_tokenizer, tmp_path / "student"), tmp_path / "out"
    before = sorted(path.name for path in tmp_path.iterdir())
    words = (folder, "--to", "onnx", "--quantize", "int4", "--out", out)
    line = refused(*words, "--least", 1)
    assert "--quantize int4: agreement 9" in line and "less than --least 1;" in line
    assert "layers change the outputs most: " in line
    assert "network.bilstm.embeddings" in line and "--keep-float network." in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (folder / "README.md").exists()
    unknown = run(*words, "--keep-float", "network.nothing")
    assert "no such layer" in unknown.stderr and "network.bilstm.embeddings" in unknown.stderr
    assert "is being written" not in unknown.output  # a conversion takes minutes
    result = run(*words, "--least", 0.5, "--keep-float", "network.bilstm.embeddings")
    assert result.exit_code == 0, result.output
    (made,) = json.loads((out / "export.json").read_text())["files"]
    sides = [f"{n}.{side}" for n in (0, 1) for side in ("left_to_right", "right_to_left")]
    lstms = [f"network.bilstm.layers.{name}" for name in sides]  # int4 has none
    assert sorted(made["kept_float"]) == ["network.bilstm.embeddings", *lstms]
    in_float = ", ".join(made["kept_float"])
    assert f"but for {in_float}" in (out / "README.md").read_text()
    assert f"onnx/model_q4.onnx: in float32: {in_float}\n" in result.output
    none = ("network.bilstm.embeddings", "network.classifier")
    line = refused(*words[:-1], tmp_path / "x", *(w for n in none for w in ("--keep-float", n)))
    assert "--quantize int4: no layer is left to quantise" in line


@pytest.mark.usefixtures("unmeasured")
def test_columns_of_a_check_have_the_names_that_are_given(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    folder = bilstm(make_tokenizer, tmp_path / "student")
    path, lines = tmp_path / "tags.jsonl", tmp_path / "lines.txt"
    path.write_text('{"w": ["the", "old", "lamp"], "t": ["DET", "ADJ", "NOUN"]}\n' * 4)
    lines.write_text("the old lamp\n")
    words = (folder, "--to", "torchscript", "--out", tmp_path / "out")
    named = ("--text-column", "w", "--label-column", "t")
    student = load_student(folder)
    sentence = [word["tag"] for word in json.loads(predicted(folder, "the old lamp")[0])["words"]]
    path.write_text(json.dumps({"w": ["the", "old", "lamp"], "t": sentence}) + "\n")
    assert export_check(student, path, {"text": "w", "label": "t"}).student_score == 1
    wrong = ["ADJ" if tag == "DET" else "DET" for tag in sentence]
    path.write_text(json.dumps({"w": ["the", "old", "lamp"], "t": wrong}) + "\n")
    line = refused(*words, "--check", path, *named)
    assert "the student itself scores 0.00 on it: train it longer, or with a higher --lr" in line
    path.write_text(json.dumps({"w": ["the", "old", "lamp"], "t": sentence}) + "\n")
    line = refused(*words, "--check", path)
    assert "--text-column" in line
    result = run(*words, "--check", path, *named)
    assert result.exit_code == 0, result.output
    for more, message in (
        (named, "--text-column, --label-column: needs --check FILE"),
        (("--check", lines, *named), "lines.txt is read as lines, without columns; leave"),
        (("--check", path, "--score-column", "s"), "--score-column: the examples of this student"),
    ):
        assert message in refused(*words[:-1], tmp_path / "no", *more)


def test_torchscript(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    student, format = load_student(bilstm(make_tokenizer, tmp_path / "s")), FORMATS["torchscript"]
    format.write(student, tmp_path / "model.pt")
    run = format.open(tmp_path / "model.pt", student.output, 1)
    assert export_check(student, None).share(run) == 1
    if (full := Path("/dev/full")).exists():
        with pytest.raises(OSError, match="No space left"):
            format.write(student, full)


@pytest.mark.usefixtures("unmeasured")
def test_two_exports_to_one_folder(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    def say(line: str) -> None:
        if line.endswith("loads the student"):
            out.mkdir()

    folder, out = bilstm(make_tokenizer, tmp_path / "s"), tmp_path / "out"
    options = ExportOptions(folder=folder, out=out, to=("torchscript",))
    with pytest.raises(UserError, match="out: exists already; choose another"):
        export(options, say)
    assert list(out.iterdir()) == []
    out.rmdir()
    left = tmp_path / f".tmp-unfinished-out-{'0' * 16}"  # of an export that was killed
    (left / "onnx").mkdir(parents=True)
    export(options, str)
    assert {path.name for path in tmp_path.iterdir()} == {"s", "out"}
    out = tmp_path / "link"
    out.symlink_to(tmp_path / "nowhere")
    assert "link: exists already" in refused(folder, "--to", "torchscript", "--out", out)


@pytest.mark.usefixtures("unmeasured")
def test_word_vectors_for_model2vec(
    make_tokenizer: Tokenizers, shallow: Path, tmp_path: Path
) -> None:
    """Word vectors for model2vec: its own loader has the vectors of sentence-transformers, with
    dense layers, and so have the README's code and student-predict."""
    from model2vec import StaticModel
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding

    torch.manual_seed(0)
    table = StaticEmbedding(make_tokenizer("wordpiece").backend_tokenizer, embedding_dim=8)
    linear = Dense(8, 12, bias=False, activation_function=None)
    expected = SentenceTransformer(modules=[table, linear, normalize()], device="cpu")
    expected.save(str(tmp_path / "student"), create_model_card=False)
    out, card = tmp_path / "out", tmp_path / "student" / "README.md"
    words = (tmp_path / "student", "--to", "model2vec", "--out", out)
    card.write_bytes(b"caf\xe9")
    assert f"{card}: is not UTF-8; convert it with iconv, or remove it" in refused(*words)
    card.unlink()
    before = os.umask(0o027)
    said = run(*words).output
    os.umask(before)
    assert "model2vec/model.safetensors: agreement 100.00 %" in said
    student, format = load_student(tmp_path / "student"), FORMATS["model2vec"]
    pieces = [expected.tokenizer.encode(text).tokens for text in random_texts(student)]
    assert not any("[UNK]" in each for each in pieces)
    # By default safetensors and temporary folders are for their owner alone.
    modes = [f"{(out / path).stat().st_mode:o}" for path in (".", "model2vec/model.safetensors")]
    assert modes == ["40750", "100640"]
    vectors = StaticModel.from_pretrained(out / "model2vec").encode(TEXTS)
    assert vectors == pytest.approx(expected.encode(TEXTS), abs=1e-6)
    answers = [json.loads(line) for line in predicted(out, *TEXTS)]
    assert [each["vector"] for each in answers] == pytest.approx(vectors, abs=1e-4)
    # Unknown pieces are left out, as the library does, and the agreement reports it.
    (tmp_path / "unknown.txt").write_text(unknown := "lamp \u2603 of \u2603 the tower\n")
    (answer,) = predicted(out, unknown.strip())
    (vector,) = StaticModel.from_pretrained(out / "model2vec").encode([unknown.strip()])
    assert json.loads(answer)["vector"] == pytest.approx(vector, abs=1e-5)
    runner = format.open(out / "model2vec/model.safetensors", student.output, 1)
    assert export_check(student, tmp_path / "unknown.txt").share(runner) < 0.999
    written = (out / "README.md").read_text()
    assert "model2vec reads all of a text, the other programs its first 8192 tokens." in written
    code = written.partition("```python\n")[2].partition("```")[0]
    assert printed_by(sys.executable, "-c", code, cwd=out).count("[") == 3  # two vectors
    line = refused(embedder(shallow, tmp_path / "e"), "--to", "model2vec", "--out", tmp_path / "no")
    assert line == (
        "Error: --to model2vec: exports only static students (static:256), and this student has"
        " layers; give --to onnx"
    )
    assert not (tmp_path / "no").exists()


def predicted(folder: Path, *texts: str) -> list[str]:
    """Return the output lines of student-predict."""
    from teachonce.student_predict.cli import main as student_predict

    done = CliRunner().invoke(student_predict, [str(folder), *texts])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.slow
def test_an_operator_that_cannot_be_exported_is_one_line(
    make_tokenizer: Tokenizers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from teachonce.student_export.loaded_student import StaticVectorNetwork

    folder = static(make_tokenizer, tmp_path / "student")

    def odd(self: Any, ids: Any, mask: Any) -> Any:
        return torch.linalg.eig(self.embedding(ids).mean(1, keepdim=True).expand(-1, 8, -1))[0].real

    monkeypatch.setattr(StaticVectorNetwork, "forward", odd)
    line = refused(folder, "--to", "onnx", "--out", tmp_path / "out")
    assert "torch cannot export it to ONNX" in line and len(line) < 500


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--to coreml", "--to coreml: expected one of onnx, openvino, torchscript, gguf"),
        ("--to tflite", "--to tflite: expected one of onnx, openvino, torchscript"),
        ("", "--to is missing"),
        (
            "--to torchscript --quantize int8",
            "torchscript does not support it; give --to onnx or openvino",
        ),
        (
            "--to openvino --quantize int4",
            "give --quantize int8, or give --to onnx, or leave --quantize out",
        ),
        ("--to onnx --keep-float a", "--keep-float needs --quantize"),
        ("--to onnx --quantize=", "--quantize: is empty"),
        ("--to onnx --quantize q9", "give --quantize int8 or int4, or leave --quantize out"),
        (
            "--to gguf --quantize q9",
            "--quantize q9: gguf does not support it; give --quantize f16 or q8_0 or",
        ),
        (
            "--to onnx --to gguf --quantize int8",
            "gguf does not support it; give --to onnx or openvino, or leave --quantize out",
        ),
        ("--to onnx --least 0", "--least 0: expected a share above 0, at most 1"),
        ("--to onnx", "no such folder"),
    ],
)
def test_what_does_not_fit_is_one_line(words: str, message: str, tmp_path: Path) -> None:
    line = refused(tmp_path / "nowhere", *words.split(), "--out", tmp_path / "out")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_a_missing_exporter_and_a_bare_encoder_are_one_line(
    tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = tiny_teacher("distilbert", "classification", ("a", "b"))
    words = (teacher, "--to", "onnx", "--out", tmp_path / "out")
    tagged = write_tagged(tmp_path / "tags.tsv", 3, 0)
    assert "no column 'text'" in refused(*words, "--check", tagged)
    strange = classified(tmp_path / "labels.tsv", 6, 0)
    assert "unknown to the model" in refused(*words, "--check", strange)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnxscript", None)
        assert "needs onnxscript" in refused(*words)
        assert "pip install 'teachonce[export]'" in refused(*words)
    for loader in (AutoModel, AutoModelForQuestionAnswering):
        model = loader.from_pretrained(tiny_teacher("bert"))
        model.save_pretrained(tmp_path / "bare")
        AutoTokenizer.from_pretrained(tiny_teacher("bert")).save_pretrained(tmp_path / "bare")
        line = refused(tmp_path / "bare", *words[1:])
        assert f"{type(model).__name__} has neither a head that can be exported nor" in line


@pytest.mark.usefixtures("unmeasured")
def test_openvino(shallow: Path, tmp_path: Path) -> None:
    """Vectors, in int8 as well, and the README's program."""
    from tests.student_predict.test_predict import answers, by_code, close

    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    folder, out = embedder(shallow, tmp_path / "s"), tmp_path / "out"
    made = run(folder, "--to", "openvino", "--out", out)
    assert made.exit_code == 0, made.output
    lines = "".join(f"{text}\n" for text in TEXTS)
    printed = by_code(
        out / "answer_openvino.py", lines, "torch", "transformers", "teachonce", "onnxruntime"
    )
    assert close(printed, answers(folder, *TEXTS))
    student, format = load_student(folder), FORMATS["openvino"]
    path, eighth = out / format.names[""], tmp_path / "int8.xml"
    assert format.layers and format.quantise
    parts = [part for some in format.layers(path).values() for part in some]
    format.quantise(path, eighth, "int8", parts)
    for file, least in ((path, 0.9999), (eighth, 0.98)):
        assert export_check(student, None).share(format.open(file, student.output, 1)) > least


def test_the_options_name_every_format() -> None:
    assert tuple(FORMATS) == tuple(SUPPORT)
    for name, support in SUPPORT.items():
        assert set(FORMATS[name].names) == {"", *support.quantised}


def test_the_size_of_a_folder_is_of_its_weights_in_one_format(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"12345")
    assert export_size(tmp_path) == 5
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert export_size(tmp_path) == 3


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "measures its time and memory was killed, perhaps because memory ran out"),
        (signal.SIGSEGV, r"measures its time and memory crashed \(Segmentation fault\); update"),
    ],
)
def test_a_measurement_whose_process_is_killed_is_one_line(
    tmp_path: Path, number: signal.Signals, message: str
) -> None:
    def kill() -> None:
        while not (running := multiprocessing.active_children()):
            time.sleep(0.01)
        os.kill(running[0].pid or 0, number)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(UserError, match=message):
        costs_of(None, tmp_path, "logits", [{}], {})
    killer.join()


def test_a_measurement_whose_process_fails_is_one_line(tmp_path: Path) -> None:
    """An error of the student arrives as it is; the exit code of a process that cannot start is
    reported."""
    with pytest.raises(UserError, match="no such file or folder|is not a model|config.json"):
        costs_of(None, tmp_path, "logits", [{}], {})
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from pathlib import Path\n"
        "from teachonce.student_export.costs import costs_of\n"
        "costs_of(None, Path('.'), 'logits', [{}], {})\n"
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert "ended with exit code 1, and its error is above; a script that calls" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_student_is_timed_leaves_nothing(
    make_tokenizer: Tokenizers, tmp_path: Path, number: signal.Signals
) -> None:
    """A stop ends the process that measures, removes the temporary folder and prints one line."""
    student, log = bilstm(make_tokenizer, tmp_path / "student"), tmp_path / "log"
    words = (student, "--to", "torchscript", "--out", tmp_path / "out")
    stopped = fork(command, "teachonce.student_export.cli", *words, log=log)
    children = Path(f"/proc/{stopped.pid}/task/{stopped.pid}/children")

    def measuring() -> list[Path]:
        running = [Path(f"/proc/{each}") for each in children.read_text().split()]
        return [each for each in running if b"spawn_main" in (each / "cmdline").read_bytes()]

    # The first one measures the file, and ends as well.
    wait_for(lambda: "is timed" in log.read_text() and measuring(), 300)
    (process,) = measuring()
    os.kill(stopped.pid or 0, number)
    assert finish(stopped) == 128 + number
    assert last_line(log) == "Stopped: run the same command again"
    assert not process.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "student"]
