"""Predictions of a student and of its exports equal transformers and sentence-transformers."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from teachonce.checkpoints import bilstm
from teachonce.checkpoints.bilstm import BiLstmConfig
from teachonce.downstream.tasks.tagging import PartsOfSpeech
from teachonce.student_export.cards import Exported
from teachonce.student_export.cli import main as student_export
from teachonce.student_export.formats.registry import FORMATS
from teachonce.student_export.job import export, write_metadata, write_tokenizer
from teachonce.student_export.loaded_student import load_student
from teachonce.student_export.options import ExportOptions
from teachonce.student_export.run_code import check_answers, run_code
from teachonce.student_export.student_inputs import INPUTS as INPUT_NAMES
from teachonce.student_predict.answers import Predictor
from teachonce.student_predict.cli import main
from teachonce.student_predict.texts import InputText
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.words import word_spans
from tests.checkpoints.test_embedders import static
from tests.downstream.support import table
from tests.making.environment import printed_by
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed
from tests.student_export.test_export import UNMEASURED, embedder, shallow

TEXTS = ("the lamp", "the keeper of the old tower read letters", "moss")
IOB = ("O", "B-PER", "I-PER", "B-LOC")
__all__ = ["shallow"]  # the fixture


def run(*words: object, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], input=input)


def answers(*words: object, input: str | None = None) -> list[dict[str, Any]]:
    result = run(*words, input=input)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def refused(*words: object, input: str | bytes | None = None) -> str:
    result = run(*words, input=input)
    assert result.exit_code == 1 and "Traceback" not in result.output, result.output
    (line,) = result.stderr.strip().splitlines()
    return line.removeprefix("Error: ")


def made(folder: Path, tokenizer: Any, head: str, labels: tuple[str, ...], **settings: Any) -> Path:
    """Save a random BiLSTM, which torch exports in a second, ten times faster than a
    transformer."""
    config = BiLstmConfig(
        vocab_size=len(tokenizer),
        embedding_size=16,
        lstm_size=12,
        num_hidden_layers=1,
        initializer_range=1.0,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **settings,
    )
    torch.manual_seed(0)
    getattr(bilstm, f"BiLstmFor{head}")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def by_code(program: Path, lines: Path | str, *missing: str) -> list[dict[str, Any]]:
    """Run a program of an export on a file or on text from stdin, in another folder, in a process
    without access to some libraries."""
    before = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import runpy"
    run = f"{before}; runpy.run_path({str(program)!r}, run_name='__main__')"
    words = [sys.executable, "-c", run, *([str(lines)] if isinstance(lines, Path) else [])]
    given = "" if isinstance(lines, Path) else lines
    return [json.loads(line) for line in printed_by(*words, given=given).splitlines()]


@pytest.fixture(scope="module")
def students(
    shallow: Path, make_tokenizer: Tokenizers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Save a student of each kind of predictions."""
    root, tokenizer = tmp_path_factory.mktemp("students"), make_tokenizer("wordpiece")
    classes, several = ("good", "bad", "so"), "multi_label_classification"

    def student(name: str, head: str, labels: tuple[str, ...] = (), **settings: Any) -> Path:
        return made(root / name, tokenizer, head, labels, **settings)

    return {
        "mlm": student("mlm", "MaskedLM"),
        "classifier": student("classifier", "SequenceClassification", classes),
        "several labels": student(
            "several", "SequenceClassification", classes, problem_type=several
        ),
        "reranker": student("reranker", "SequenceClassification", ("LABEL_0",)),
        "tagger": student("tagger", "TokenClassification", IOB),
        "tagger of words": student("words", "TokenClassification", ("DET", "ADJ", "NOUN")),
        "embedder": embedder(shallow, root / "embedder"),
        "static": static(make_tokenizer, root / "static"),
    }


INPUTS: dict[str, tuple[str, ...]] = {
    "mlm": ("the [MASK] of the old [MASK].", "old [MASK]"),
    "classifier": TEXTS,
    "several labels": TEXTS,
    "reranker": ("the lamp\tmoss", "old letters\tthe keeper of the tower"),
    "tagger": ("The keeper, of U.S. letters!", "moss"),
    "embedder": TEXTS,
    "static": TEXTS,
    "tagger of words": ("the old lamp", "stairs"),
}


def close(found: Any, expected: Any) -> bool:
    """Return whether two results differ only in the last digits of their numbers."""
    if isinstance(expected, float):
        return bool(abs(found - expected) < 1e-4)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == expected)


APART = {"embedder", "classifier", "tagger"}  # torch exports a transformer in seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.apart] * (kind in APART)) for kind in INPUTS]
)
def test_an_export_answers_as_its_student(
    kind: str, students: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    words = (students[kind], "--to", "onnx", "--to", "torchscript", "--out", tmp_path / "out")
    made = CliRunner().invoke(student_export, list(map(str, words)))
    assert made.exit_code == 0, made.output
    pairs = ["--pairs"] if kind == "reranker" else []
    own = answers(students[kind], *INPUTS[kind], *pairs)
    assert [*own[0]][: 1 + len(pairs)] == (["text_a", "text_b"] if pairs else ["text"])
    for file in ("onnx/model.onnx", "torchscript/model.pt"):
        found = answers(tmp_path / "out", *INPUTS[kind], *pairs, "--file", file)
        assert close(found, own), (found, own)
    out, lines = tmp_path / "out", "".join(f"{text}\n" for text in (*INPUTS[kind], ""))
    (tmp_path / "lines.txt").write_text(lines)
    blank = {**dict.fromkeys(own[0].keys() & {"text", "text_a", "text_b"}, ""), "empty": True}
    for name, given, other in (
        ("answer_onnx.py", tmp_path / "lines.txt", "torch"),
        ("answer_torchscript.py", lines, "onnxruntime"),
    ):
        printed = by_code(out / name, given, "transformers", "teachonce", other)
        assert close(printed, [*own, blank]), printed
    # Another tagging scheme: E-PER ends an entity, S-LOC is a single-word entity.
    if kind == "tagger":
        changed(out, "export.json", labels=["O", "B-PER", "E-PER", "S-LOC"])
        printed = by_code(out / "answer_onnx.py", lines)
        assert close(printed[:-1], answers(out, *INPUTS[kind]))
        assert printed[0]["entities"] != own[0]["entities"]
        changed(out, "export.json", labels=["O", "B-PER", "L-PER", "U-PER"])
        printed = by_code(out / "answer_onnx.py", lines)
        assert close(printed[:-1], answers(out, *INPUTS[kind]))
    if kind == "mlm":
        folder = shutil.copytree(students[kind], tmp_path / "special")
        network = bilstm.BiLstmForMaskedLM.from_pretrained(folder)
        with torch.no_grad():
            network.decoder.bias[network.config.pad_token_id] = 99.0
        network.save_pretrained(folder)
        FORMATS["onnx"].write(load_student(folder), out / "onnx/model.onnx")
        printed = by_code(out / "answer_onnx.py", "\ufeffold [MASK]\n")
        assert close(printed, answers(folder, "old [MASK]"))
        assert printed[0]["masks"][0]["pieces"][0]["piece"] == "[PAD]"
    if kind == "classifier":  # a model of pairs, by its record
        folder, pair = shutil.copytree(students[kind], tmp_path / "pairs"), "the lamp\tmoss"
        task = {"features": {"task": {"separator": "\n"}}}
        record = {"settings": {}, "store": task, "environments": [], "tokenizer": ""}
        (folder / "training.json").write_text(json.dumps(record))
        program = out / "answer_pairs.py"
        program.write_text(run_code(load_student(folder), "onnx", "onnx/model.onnx"))
        assert close(by_code(program, f"{pair}\n"), answers(folder, pair, "--pairs"))
        task["features"]["task"] = {"kind": "classification"}  # of single texts
        (folder / "training.json").write_text(json.dumps(record))
        assert "is a pair, and the student reads single" in refused(folder, pair, "--pairs")
        with pytest.raises(
            AssertionError, match="<stdin>, line 2: expected two texts with a TAB between"
        ):
            by_code(program, f"{pair}\nno tab\n")
        closed = ["sh", "-c", '"$0" "$1" <&-', sys.executable, str(program)]
        assert subprocess.run(closed, capture_output=True, check=True).stdout == b""


def test_an_activation_that_no_program_computes_is_refused(
    students: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(students["reranker"], tmp_path / "s")
    name = "torch.nn.modules.activation.Softplus"
    changed(folder, "config.json", sentence_transformers={"activation_fn": name})
    with pytest.raises(UserError, match=r"torch\.nn\.Softplus, .* cannot compute \(Id") as error:
        export(ExportOptions(folder, tmp_path / "out", ("onnx",)), lambda line: None)
    assert "\n" not in str(error.value)
    name = "torch.nn.modules.linear.Linear"
    changed(folder, "config.json", sentence_transformers={"activation_fn": name})
    assert "activation 'Linear': cannot be applied to a score (" in refused(
        folder, "a\tb", "--pairs"
    )


def test_a_label_of_a_checkpoint_is_no_code_of_a_program(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    label = 'X" or exit() or "'
    labels = ("O", "B-PER", "I-PER", label)
    tokenizer = make_tokenizer("wordpiece")
    folder = made(tmp_path / "a", tokenizer, "TokenClassification", labels, later_label=label)
    program = run_code(load_student(folder), "onnx", "onnx/model.onnx")
    nodes = [*ast.walk(ast.parse(program))]
    assert label in [node.value for node in nodes if isinstance(node, ast.Constant)]
    assert "exit" not in [node.id for node in nodes if isinstance(node, ast.Name)]


def test_answers_match_the_libraries(students: dict[str, Path]) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from transformers import pipeline

    for kind, function in (("classifier", "softmax"), ("several labels", "sigmoid")):
        predict = pipeline("text-classification", str(students[kind]), function_to_apply=function)
        for text, found in zip(TEXTS, answers(students[kind], *TEXTS), strict=True):
            each = {one["label"]: one["score"] for one in predict(text, top_k=None)}
            assert found["probabilities"] == pytest.approx(each, abs=1e-5)
            assert list(found["probabilities"]) == sorted(each, key=lambda name: -each[name])
            best = max(each, key=lambda name: each[name])
            chosen = [name for name in ("good", "bad", "so") if each[name] >= 0.5]
            assert found.get("label", best) == best and found.get("labels", chosen) == chosen
    vectors = SentenceTransformer(str(students["embedder"]), device="cpu").encode(list(TEXTS))
    embedded = [each["vector"] for each in answers(students["embedder"], *TEXTS)]
    assert np.allclose(embedded, vectors, atol=1e-6)
    (pair,) = answers(students["embedder"], f"{TEXTS[0]}\t{TEXTS[1]}", "--pairs")
    assert pair["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    scores = CrossEncoder(str(students["reranker"]), device="cpu").predict(
        [tuple(line.split("\t")) for line in INPUTS["reranker"]]
    )
    scored = answers(students["reranker"], *INPUTS["reranker"], "--pairs")
    assert [each["score"] for each in scored] == pytest.approx(scores.tolist(), abs=1e-5)
    fill = pipeline("fill-mask", str(students["mlm"]))
    (filled,) = answers(students["mlm"], "old [MASK]", "--top", 3)
    (mask,) = filled["masks"]
    assert (mask["begin"], mask["end"]) == (4, 10)
    for piece, one in zip(mask["pieces"], fill("old [MASK]", top_k=3), strict=True):
        assert piece["piece"] == one["token_str"]
        assert piece["probability"] == pytest.approx(one["score"], abs=1e-5)
    assert filled["filled"] == f"old {mask['pieces'][0]['piece']}".replace(" ##", "")


@pytest.mark.parametrize(
    ("kind", "token", "filled"),
    [
        ("bpe", "s", "the olds\nlamp"),
        ("bpe", "Ġs", "the old s\nlamp"),
        ("bpe", "<unk>", "the old <unk>\nlamp"),
        ("unigram", "s", "the olds\nlamp"),
        ("unigram", "▁", "the old \nlamp"),
        ("wordpiece", "##s", "the olds\nlamp"),
        ("wordpiece", "s", "the old s\nlamp"),
        ("wordpiece", ".", "the old .\nlamp"),
        ("wordpiece", None, "the old \nlamp"),
    ],
)
def test_a_piece_inside_a_word_is_filled_in_without_a_space(
    make_tokenizer: Tokenizers, tmp_path: Path, kind: str, token: str | None, filled: str
) -> None:
    """The marks of the vocabulary show whether a piece begins a word. None is an output without a
    piece."""
    tokenizer = make_tokenizer(kind)
    student = load_student(made(tmp_path / "student", tokenizer, "MaskedLM", ()))
    number = len(tokenizer) if token is None else tokenizer.convert_tokens_to_ids(token)
    assert token is None or tokenizer.convert_ids_to_tokens(number) == token

    def one_piece(inputs: dict[str, Array]) -> Array:
        logits = np.zeros((*inputs["input_ids"].shape, len(tokenizer) + 1), np.float32)
        logits[..., number] = 1
        return logits

    text = f"the old {tokenizer.mask_token}\nlamp"
    (answer,) = Predictor(student, one_piece, [InputText((text,), "TEXT 1")]).answers()
    assert answer["filled"] == filled
    # the function of an export's program
    code = run_code(student, "onnx", "onnx/model.onnx")
    names: dict[str, Any] = {"tokenizer": tokenizer.backend_tokenizer, "np": np, "re": re}
    names["run"] = lambda encoding: one_piece({"input_ids": np.array([encoding.ids])})[0]
    settings = code[code.index("mask = ") : code.index("def run(")]
    exec(settings + code[code.index("def softmax(") : code.index("if __name__")], names)
    assert names["answer"](text)["filled"] == filled


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_an_export_whose_outputs_are_others_is_one_line(
    students: dict[str, Path], tmp_path: Path
) -> None:
    student, format = load_student(students["classifier"]), FORMATS["torchscript"]
    path = tmp_path / format.names[""]
    path.parent.mkdir()
    format.write(student, path)
    write_tokenizer(student, tmp_path)
    made = Exported(format.names[""], "as much", 1.0, None, UNMEASURED)
    write_metadata(student, [made], tmp_path)
    changed(tmp_path, "export.json", pairs=False)
    line = refused(tmp_path, "a\tb", "--pairs")
    assert "TEXT 1: is a pair, and the student reads single texts (classification); " in line
    changed(tmp_path, "export.json", labels=["good"])
    line = refused(tmp_path, "a")
    assert "has outputs of shape [1, 3], which do not fit kind classification with 1 label" in line
    changed(tmp_path, "export.json", labels=["good", "bad", "so"])
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), path)
    line = refused(tmp_path, "a")
    assert "model.pt: cannot be run with the inputs of export.json (" in line


def test_scores_of_single_texts(students: dict[str, Path], tmp_path: Path) -> None:
    """A reranker that gets single texts is pointed to pairs. A model with one output that was
    trained on single texts is no reranker."""
    folder = shutil.copytree(students["reranker"], tmp_path / "s")
    result = run(folder, "the lamp")
    assert result.exit_code == 0 and "the student scores pairs: give two texts" in result.stderr
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"text_pairs": False}))
    assert not run(folder, "the lamp").stderr
    assert "is a pair, and the student reads single" in refused(folder, "the lamp\tmoss", "--pairs")
    assert "def answer(text):" in run_code(load_student(folder), "onnx", "onnx/model.onnx")


def test_words_have_the_tag_of_their_first_piece(students: dict[str, Path]) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    text = INPUTS["tagger"][0]
    (found,) = answers(students["tagger"], text)
    expected = ["The", "keeper", ",", "of", "U.S", ".", "letters", "!"]
    assert [word["word"] for word in found["words"]] == expected
    model = AutoModelForTokenClassification.from_pretrained(students["tagger"]).eval()
    encoded = AutoTokenizer.from_pretrained(students["tagger"])(text, return_offsets_mapping=True)
    logits = model(input_ids=torch.tensor([encoded["input_ids"]])).logits[0]
    offsets, numbers = encoded["offset_mapping"][1:-1], logits.argmax(-1)[1:-1].tolist()
    best = {begin: IOB[n] for (begin, _), n in zip(offsets, numbers, strict=True)}
    for word in found["words"]:
        assert word["tag"] == best[word["begin"]]
        assert text[word["begin"] : word["end"]] == word["word"]
    kinds = {word["tag"][2:] for word in found["words"]} - {""}
    assert kinds and {each["label"] for each in found["entities"]} == kinds
    for each in found["entities"]:
        assert text[each["begin"] : each["end"]] == each["text"]
    # later pieces of a word continue the entity before them
    changed(students["tagger"], "config.json", later_label="B-LOC")
    (joined,) = answers(students["tagger"], text)
    changed(students["tagger"], "config.json", drop=("later_label",))
    assert "B-LOC" not in {word["tag"] for word in joined["words"]}


def test_words_of_any_script() -> None:
    text = "Don't (visit) U.S., 1,000.5 – हिन्दी 東京 [MASK] x_"
    words = [
        "Don't", "(", "visit", ")", "U.S", ".", ",", "1,000.5", "–", "हिन्दी", "東", "京", "[MASK]",
        "x", "_",
    ]  # fmt: skip
    assert [text[begin:end] for begin, end in word_spans(text, "[MASK]")] == words
    assert word_spans(" ") == []


def test_long_texts(students: dict[str, Path]) -> None:
    """Taggers, classifiers and masked LMs read long texts in windows; vectors equal the
    library's."""
    from sentence_transformers import SentenceTransformer

    long = " ".join(["the old keeper of the lamp read letters"] * 40)
    result = run(students["tagger"], long, "moss")
    tagged, short = map(json.loads, result.stdout.splitlines())
    assert [word["word"] for word in tagged["words"]] == long.split()
    assert tagged["windows"] > 1 and "windows" not in short
    note = "1 of 2 texts longer than 128 tokens: read in windows\n"
    assert result.stderr == note
    (labelled,) = answers(students["classifier"], long)
    assert labelled["windows"] == tagged["windows"]
    assert sum(labelled["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    (filled,) = answers(students["mlm"], f"{long} [MASK] {long} [MASK]")
    assert [mask["begin"] for mask in filled["masks"]] == [len(long) + 1, 2 * len(long) + 9]
    result = run(students["embedder"], long)
    (embedded,) = map(json.loads, result.stdout.splitlines())
    expected = SentenceTransformer(str(students["embedder"]), device="cpu").encode([long])
    assert embedded["cut"] is True and np.allclose([embedded["vector"]], expected, atol=1e-6)
    assert result.stderr == "1 of 1 text longer than 128 tokens: cut\n"


def test_a_text_is_read_up_to_the_limit_of_its_model(
    make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """A classifier reads 1,122 tokens at once, if it has 2,048 positions and its tokenizer no
    smaller limit; the answer is that of transformers."""
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    tokenizer, folder = make_tokenizer("wordpiece"), tmp_path / "student"
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
        initializer_range=1.0,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "good", 1: "bad"},
        label2id={"good": 0, "bad": 1},
    )
    torch.manual_seed(0)
    model = ModernBertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.model_max_length = 10**30
    tokenizer.save_pretrained(folder)
    long = " ".join(["the old keeper of the lamp read letters"] * 70)
    inputs = tokenizer(long, return_tensors="pt")
    assert 1024 < inputs["input_ids"].shape[1] < 2048
    with torch.inference_mode():
        expected = model(inputs["input_ids"], inputs["attention_mask"]).logits.softmax(1)[0]
    (found,) = answers(folder, long)
    assert "windows" not in found
    assert found["probabilities"]["bad"] == pytest.approx(float(expected[1]), abs=1e-4)
    tokenizer.model_max_length = 512  # trained on texts of this length
    tokenizer.save_pretrained(folder)
    assert answers(folder, long)[0]["windows"] >= 3


def test_batches_of_long_texts_have_fewer_texts(students: dict[str, Path]) -> None:
    student = load_student(students["classifier"])
    lengths = [512] * 20 + [1, 8192, 2, 3]
    batches = student.batches([{"input_ids": [1] * length} for length in lengths])
    assert [each["input_ids"].shape for each in batches] == [
        *((16, 512), (5, 512), (1, 8192), (2, 3))
    ]


def test_an_int8_export_answers_alike_in_every_batch(
    students: dict[str, Path], tmp_path: Path
) -> None:
    """onnxruntime quantises the activations of a batch with one scale, therefore each text is run
    alone."""
    student, format = load_student(students["tagger of words"]), FORMATS["onnx"]
    source, path = tmp_path / "model.onnx", tmp_path / "model_quantized.onnx"
    format.write(student, source)
    assert format.layers and format.quantise
    every = [node for nodes in format.layers(source).values() for node in nodes]
    format.quantise(source, path, "int8", every)
    run = format.open_repeatable(path, student.output, 1)
    together = run(student.encode(list(TEXTS)))
    assert together.shape[:2] == student.encode(list(TEXTS))["input_ids"].shape
    for text, found in zip(TEXTS, together, strict=True):
        (alone,) = format.open(path, student.output, 1)(student.encode([text]))
        assert np.array_equal(found[: len(alone)], alone) and not found[len(alone) :].any()


def test_the_program_of_a_tagger_reads_words_and_refuses_files_in_a_line(
    students: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`answer(words=...)` gives the tags of student-predict for words that are given."""
    words = ["the", "old-lamp", "\u0007", "of", "letters"]
    (tmp_path / "words.conll").write_text("".join(f"{word}\tO\n" for word in words))
    student, out = load_student(students["tagger"]), tmp_path / "out"
    (out / "torchscript").mkdir(parents=True)
    FORMATS["torchscript"].write(student, out / "torchscript/model.pt")
    write_tokenizer(student, out)
    write_metadata(student, [], out)
    program = out / "answer_torchscript.py"
    program.write_text(run_code(student, "torchscript", "torchscript/model.pt"))
    answer = runpy.run_path(str(program))["answer"]
    (own,) = answers(students["tagger"], "--input", tmp_path / "words.conll")
    assert close({"text": own["text"], **answer(words=words)}, own)
    assert [word["word"] for word in own["words"]] == words
    assert close(
        {"text": "old lamp", **answer("old lamp")}, answers(students["tagger"], "old lamp")[0]
    )
    monkeypatch.setattr("sys.argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(program), run_name="__main__")
    assert (
        not stopped.value.code
        and "python answer_torchscript.py [FILE]..." in capsys.readouterr().out
    )
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, str(program), str(tmp_path / "words.conll")]
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")
    lines = {"/dev/full": b"stdout: cannot be written (", "&-": b"stdout: is closed, so no answer"}
    for stdout, line in lines.items():
        shell = ["sh", "-c", f'"$@" >{stdout}', "sh", *words]
        ended = subprocess.run(shell, capture_output=True, check=False)
        assert ended.returncode == 1 and ended.stderr.startswith(line), ended.stderr
        assert ended.stderr.count(b"\n") == 1
    with pytest.raises(
        AssertionError, match=r"none\.txt: cannot be read \(.*No such file"
    ) as failed:
        by_code(program, tmp_path / "none.txt")
    assert "Traceback" not in str(failed.value)


def test_a_word_longer_than_the_window_is_marked(students: dict[str, Path]) -> None:
    long = "/".join(["lamp"] * 200)
    for kind, text in (("tagger", long), ("classifier", f"moss {long}"), ("mlm", f"[MASK] {long}")):
        result = run(students[kind], text, "old [MASK]")
        cut, whole = map(json.loads, result.stdout.splitlines())
        assert cut["cut"] is True and "cut" not in whole, kind
        *_, note = result.stderr.splitlines()
        assert note.startswith("1 of 2 texts with a word longer than 128 tokens: its end is cut")


def test_texts_come_from_files_and_stdin(students: dict[str, Path], tmp_path: Path) -> None:
    """Answers are in the order of the lines; a blank line has an answer without content."""
    folder = students["classifier"]
    expected = answers(folder, *TEXTS)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join([TEXTS[0], "", *TEXTS[1:]]) + "\n")
    result = run(folder, "--input", lines)
    assert result.stderr == "1 of 4 texts blank: without an answer\n"
    blank = {"text": "", "empty": True}
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert close(found, [expected[0], blank, *expected[1:]])
    rows = table(tmp_path / "rows.jsonl", "body", [(text,) for text in TEXTS])
    assert close(answers(folder, "--input", rows, "--text-column", "body"), expected)
    assert close(answers(folder, input="\ufeff" + "\r\n".join(TEXTS)), expected)
    pairs = table(tmp_path / "pairs.tsv", "text_a text_b", [("the lamp", "moss")])
    (pair,) = answers(students["reranker"], "--input", pairs)
    (typed,) = answers(students["reranker"], "the lamp\tmoss", "--pairs")
    assert close(pair, typed)


@pytest.mark.parametrize("words", [(), ("--input", "-")])
def test_stdin_is_checked_like_a_file(students: dict[str, Path], words: tuple[str, ...]) -> None:
    """The message has the line, the byte, and a command that converts what was piped."""
    cases = {
        "le café noir\n": ("latin-1", "line 2: not UTF-8 at byte 9 (0xe9): looks like Latin-1"),
        "Старый маяк\n": ("cp1251", "line 2: not UTF-8 at byte 3 (0xd1): looks like cp1251"),
    }
    for text, (encoding, message) in cases.items():
        raw = b"ok\n" + text.encode(encoding)
        line = refused(students["classifier"], *words, input=raw)
        assert line.startswith(f"stdin, {message}")
        command = line.partition("pipe it through `")[2].removesuffix("` first")
        piped = subprocess.run(["sh", "-c", command], input=raw, capture_output=True, check=True)
        assert piped.stdout.decode() == f"ok\n{text}"
    raw = "très café\nok\n".encode() + "é".encode()[:1] + b" ok\n"
    line = refused(students["classifier"], *words, input=raw)
    assert line.startswith("stdin, line 3: not UTF-8 at byte 15 (0xc3): a broken character")
    assert line.endswith(
        "delete all broken characters: pipe it through `iconv -c -f UTF-8 -t UTF-8` first"
    )


def test_a_closed_stdin_has_no_text(students: dict[str, Path]) -> None:
    command = f"{sys.executable} -m teachonce.student_predict {students['classifier']} <&-"
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    message = "stdin: has no text; give TEXT, --input FILE or lines on stdin"
    assert (found.returncode, found.stderr) == (1, f"Error: {message}\n")


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("classifier", [""], "the texts: has no text; give TEXT, --input FILE or lines on stdin"),
        ("classifier", [], "stdin: has no text"),
        ("classifier", ["a", "b\udcff"], "TEXT 2: character 2 is '\\udcff', half of a character"),
        ("classifier", ["a", "--input", "b.txt"], "give texts on the command line or --input"),
        ("classifier", ["a", "--pairs"], "TEXT 1: expected two texts with a TAB between them"),
        ("classifier", ["a", "--file", "onnx/model.onnx"], "is not an export (export.json)"),
        ("classifier", ["a", "--top", "0"], "--top 0: expected at least 1"),
        ("classifier", ["a", "--text-column", "b"], "need --input FILE"),
        ("tagger", ["a\tb", "--pairs"], "TEXT 1: is a pair, and the student reads single texts"),
        ("tagger", ["a", "--top", "2"], "--top 2: ranks the labels of a text"),
        ("embedder", ["a", "--format", "tsv"], "and this student gives vectors; leave --format"),
        ("mlm", ["[MASK]", "--format", "tsv"], "and this student gives filled masks; leave"),
        ("reranker", ["a\tb", "--pairs", "--format", "tsv"], "gives scores; leave --format out"),
        ("several labels", ["a", "--format", "tsv"], "gives several labels; leave --format out"),
        ("classifier", ["a", "--format", "tsv", "--top", "1"], "--top: --format tsv prints the"),
        ("mlm", ["a [MASK]", "b"], "TEXT 2: has no [MASK]; write [MASK] where the masked LM"),
    ],
)
def test_what_does_not_fit_is_one_line(
    students: dict[str, Path], kind: str, words: list[str], message: str
) -> None:
    assert message in refused(students[kind], *words, input="")


def test_a_tokenizer_without_a_mask_is_one_line(students: dict[str, Path]) -> None:
    """An export whose tokenizer_config.json was not copied has such a tokenizer."""
    student = load_student(students["mlm"])
    student.tokenizer.mask_token = None
    with pytest.raises(UserError, match="has no mask token, so it cannot fill in pieces; copy"):
        Predictor(student, student.run, [InputText(("a",), "TEXT 1")])
    with pytest.raises(UserError, match="has no mask token"):
        check_answers(student)  # of an export's program


def test_a_tagger_tags_the_words_of_a_file(students: dict[str, Path], tmp_path: Path) -> None:
    """A tagger tags the words of a file with the task's tags, in the form of the training file."""
    sentences = [["old", "--", "..."], ["the keeper", "\u200d", "U.S."] * 60, ["moss"]]
    content = "\n\n".join("\n".join(f"{w}\tNOUN" for w in words) for words in sentences)
    path = tmp_path / "tags.tsv"
    path.write_text(content + "\n", "utf-8")
    folder = students["tagger of words"]
    result = run(folder, "--input", path, "--format", "tsv")
    assert result.exit_code == 0, result.output
    assert result.stderr == "1 of 3 texts longer than 128 tokens: read in windows\n"
    found = [block.split("\n") for block in result.stdout.rstrip("\n").split("\n\n")]
    student, task = load_student(folder), PartsOfSpeech()
    assert student.task is not None
    examples = task.read(path)
    task.adopt(student.task, {"test": examples})
    rows = task.encode(student.tokenizer, examples, student.max_length)
    logits = np.zeros((len(rows), student.max_length, len(student.task.labels)))
    for number, row in enumerate(rows):
        (output,) = student.run(student.batch([row]))
        logits[number, : len(output)] = output
    _, tags = task.tags_of_words(examples, rows, logits)
    assert found == [
        [f"{word}\t{tag}" for word, tag in zip(words, own, strict=True)]
        for words, own in zip(sentences, tags, strict=True)
    ]
    assert tags[1][1] == "O" and {tag for own in tags for tag in own} > {"O"}
    own, *_ = answers(folder, "--input", path)
    assert own["text"] == "old -- ..." and [w["word"] for w in own["words"]] == sentences[0]
    assert [word["tag"] for word in own["words"]] == tags[0]
    conll = tmp_path / "one.conll"
    conll.write_text("old NOUN\nmoss NOUN\n")
    (one,) = answers(folder, "--input", conll)
    assert [word["word"] for word in one["words"]] == ["old", "moss"]
    message = "line 1: has separate words, and the student reads texts (classification)"
    assert message in refused(students["classifier"], "--input", path)
    assert "--pairs: " in refused(folder, "--input", path, "--pairs")
    lists = tmp_path / "lists.jsonl"
    for name, words in (("tokens", ()), ("words", ()), ("w", ("--text-column", "w"))):
        rows = [{"id": "a", name: list(given), "ner_tags": []} for given in (*sentences, ())]
        lists.write_text("\n".join(map(json.dumps, rows)) + "\n")
        assert answers(folder, "--input", lists, *words)[:3] == answers(folder, "--input", path)
    lists.write_text('{"tokens": ["old", " "]}\n')
    line = refused(folder, "--input", lists)
    assert "line 1: expected a list of words in column 'tokens', got ['old', ' ']" in line
    line = refused(folder, "--input", path, "--text-column", "tokens")
    assert "--text-column: " in line and "tags.tsv is not a table" in line
    path.write_text("old\tx\tB-X\n\nmoss\tx\tO\n")
    note = f"{path}: of 3 columns the first holds the words, and column 3 the tags\n"
    assert run(folder, "--input", path).stderr == note
    path.write_text("old\tADJ\nmoss\tNOUN\n")  # may be a table with a header
    line = refused(folder, "--input", path)
    assert f"{path}, line 1: no column 'text'; " in line and "or the suffix .conll" in line
    path.write_text("old\tADJ\n\tNOUN\n\nmoss\tNOUN\n")
    assert f"{path}, line 2: expected a word, got ''" in refused(folder, "--input", path)


def test_lines_of_words_and_tags_are_not_texts(students: dict[str, Path], tmp_path: Path) -> None:
    lines = tmp_path / "tags.txt"
    lines.write_text("Anna\tB-PER\nsmiled\tO\n\nHere\tO\nis\tO\nBen\tB-PER\n")
    line = refused(students["tagger"], "--input", lines)
    assert "looks like words with tags" in line and "rename it to tags.conll" in line


def test_a_table_of_labels_is_read_again(students: dict[str, Path], tmp_path: Path) -> None:
    folder, texts = students["classifier"], (TEXTS[0], "the\tlamp\r\nmoss", "", TEXTS[2])
    result = run(folder, *texts, "--format", "tsv")
    assert result.exit_code == 0, result.output
    labels = [each["label"] for each in answers(folder, *(text for text in texts if text))]
    labels.insert(2, "")
    cells = (TEXTS[0], "the lamp moss", "", TEXTS[2])
    lines = [f"{text}\t{label}" for text, label in zip(cells, labels, strict=True)]
    assert result.stdout.splitlines() == ["text\tlabel", *lines]
    path = tmp_path / "labels.tsv"
    path.write_text(result.stdout)
    found = [each["text"] for each in answers(folder, "--input", path)]
    assert found == [cell for cell in cells if cell]  # a row without cells is no row
    (pair,) = answers(folder, "a\tb", "--pairs")
    result = run(folder, "a\tb", "--pairs", "--format", "tsv")
    assert result.stdout == f"text_a\ttext_b\tlabel\na\tb\t{pair['label']}\n"
    spans = run(students["tagger"], "moss", "", "old", "--format", "tsv").stdout.split("\n")
    assert [line.split("\t")[0] for line in spans] == ["moss", "", "", "old", ""]


def test_an_export_that_was_changed_is_one_line(
    students: dict[str, Path], tiny_teacher: Teachers, tmp_path: Path
) -> None:
    student = load_student(students["static"])
    (tmp_path / "onnx").mkdir()
    write_tokenizer(student, tmp_path)
    write_metadata(student, [], tmp_path)
    file = {"file": "onnx/model.onnx"}
    changed(tmp_path, "export.json", files=[file])
    assert "onnx/model.onnx: is missing; copy the whole folder" in refused(tmp_path, "a")
    assert "export.json lists onnx/model.onnx" in refused(tmp_path, "a", "--file", "../x.onnx")
    changed(tmp_path, "export.json", files=[])
    line = refused(tmp_path, "a")
    assert "lists no file" in line and line.endswith("export the student again")
    assert "--file" not in line
    changed(tmp_path, "export.json", files=[file])
    (tmp_path / "onnx/model.onnx").write_bytes(b"junk")
    line = refused(tmp_path, "a")
    assert f"{tmp_path}/onnx/model.onnx: onnxruntime cannot load it (" in line
    assert "copy the whole folder again, or export the student again" in line
    for change, problem in (
        ({"kind": "seq2seq"}, "kind is 'seq2seq', expected mlm"),
        ({"kind": "mlm"}, "output is sentence_embedding for kind mlm, expected logits"),
        ({"kind": "classification", "labels": []}, "number of labels must be a whole number 1.."),
        ({"kind": "embedding", "inputs": ["input_ids"]}, "inputs are input_ids, expected input_id"),
        ({"inputs": list(INPUT_NAMES), "max_length": 0}, "inputs have token_type_ids, which its"),
        ({"inputs": list(INPUT_NAMES[:2])}, "max_length is 0, expected 1 to 2,147,483,647; "),
        ({"max_length": 10**30}, "max_length is 1e+30, expected 1 to "),
        ({"max_length": "long"}, "max_length is a string, expected a number; copy it again"),
    ):
        changed(tmp_path, "export.json", **change)
        assert f"export.json: {problem}" in refused(tmp_path, "a")
    decoder = tiny_teacher("gpt2")
    assert "is a decoder, which continues a text" in (line := refused(decoder, "a"))
    assert "pipeline('text-generation')" in line
    # An export has no weights that a pipeline of transformers could load.
    changed(tmp_path, "export.json", kind="causal", inputs=[*INPUT_NAMES[:2]], max_length=16)
    assert "run it as its README.md shows" in refused(tmp_path, "a")
