"""A decoder is exported to files for other programs, which return the student's own predictions."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from onnxruntime import InferenceSession
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

from teachonce.downstream.lm.scoring import score_lm
from teachonce.downstream.options import TEST
from teachonce.downstream.settings import LmSettings
from teachonce.student_export.checking import export_check
from teachonce.student_export.formats import gguf
from teachonce.student_export.formats.gguf_contents import architecture_of, pattern_of
from teachonce.student_export.loaded_student import load_student
from teachonce.student_export.options import K_QUANT_FALLBACKS
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.settings.shapes import SHAPES
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.byte_level import FAMILIES, train_byte_level
from tests.making.environment import printed_by
from tests.making.models import Teachers
from tests.making.texts import ENGLISH, RUSSIAN
from tests.student_export.test_export import UNMEASURED, refused, run
from tests.student_export.test_other_programs import TRANSFORMERS_JS

UNTIED = "llama:64x2x4x96x2x24"
KINDS = ("llama:64x2x4x96x2", UNTIED, "qwen2:64x2x4x96x2", "qwen3:64x2x4x96x2x32", "gpt2:64x2x4x96")
TEXTS = [*ENGLISH[:2], "Don't 1234,5 \n\n  été 😀", RUSSIAN[0]]


def decoder(kind: str, folder: Path) -> Path:
    """Save a random student of a kind, with a vocabulary by that kind's pattern; UNTIED has
    separate output embeddings."""
    shape = SHAPES[kind.partition(":")[0]]
    backend = train_byte_level(ENGLISH + RUSSIAN, 500, shape.family)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **FAMILIES[shape.family].specials)
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = make_student(kind, tokenizer, 256, tie_word_embeddings=kind != UNTIED)
    with torch.no_grad():
        for weight in model.parameters():  # far from uniform, and norms far from 1
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder(KINDS[0], tmp_path_factory.mktemp("llama") / "student")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a decoder of one layer, as torch's export time grows with the number of layers."""
    return decoder("llama:64x1x4x96x2", tmp_path_factory.mktemp("shallow") / "student")


@pytest.fixture(scope="module", params=KINDS)
def each_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = str(request.param)
    return decoder(kind, tmp_path_factory.mktemp(kind.partition(":")[0]) / "student")


def logits(model: Any, tokenizer: Any, text: str) -> Array:
    with torch.no_grad():
        found = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return np.asarray(found)


def test_transformers_reads_the_file_back(each_kind: Path, tmp_path: Path) -> None:
    """Weights, sizes and tokens, for each kind of decoder, in float32 and in q8_0."""
    gguf.write_float(load_student(each_kind), tmp_path / "model.gguf")
    layers = gguf.layers(tmp_path / "model.gguf")
    nodes = [name for names in layers.values() for name in names]
    gguf.quantise(tmp_path / "model.gguf", tmp_path / "small.gguf", "q8_0", nodes)
    own: Any = AutoModelForCausalLM.from_pretrained(each_kind)
    tokenizer = AutoTokenizer.from_pretrained(each_kind)
    for name, near in (("model.gguf", 1e-4), ("small.gguf", 0.3)):
        read: Any = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=name, config=own.config, dtype=torch.float32
        )
        for text in TEXTS:
            expected = logits(own, tokenizer, text)
            assert np.abs(logits(read, tokenizer, text) - expected).max() < near
    assert (tmp_path / "small.gguf").stat().st_size < (tmp_path / "model.gguf").stat().st_size / 2


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name)
    )


@pytest.mark.usefixtures("without_llama_cpp")
def test_without_llama_cpp_the_file_is_written_and_not_compared(
    student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    out = tmp_path / "out"
    long = Path(shutil.copytree(student, tmp_path / "long"))
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    result = run(long, "--to", "gguf", "--quantize", "q4_0", "--out", out)
    assert result.exit_code == 0, result.output
    assert "gguf/model-q4_0.gguf: written, but not compared" in result.stdout
    assert "pip install llama-cpp-python" in result.stdout
    # transformers.js puts the token of the template in front of a prompt only if this is set.
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["add_bos_token"]
    about = json.loads((out / "export.json").read_text())
    assert about["max_length"] == 1024  # though a decoder is compared on shorter texts
    (made,) = about["files"]
    assert made["keeps"] is None and made["figures"]["bytes"] > 10_000
    assert "| not compared |" in (out / "README.md").read_text()
    read = AutoTokenizer.from_pretrained(out)
    assert (
        read(TEXTS[0] * 40)["input_ids"]
        == AutoTokenizer.from_pretrained(student)(TEXTS[0] * 40)["input_ids"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gpt2:64x1x4", *(pytest.param(kind, marks=pytest.mark.apart) for kind in KINDS)]
)
def test_onnx_goes_on_from_its_cache(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, and with padding on the left, as generation does."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    folder = decoder(kind, tmp_path / "student")
    result = run(folder, "--to", "onnx", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "onnx/model.onnx: agreement 100.00 % (entropy" in result.stdout
    session = InferenceSession(tmp_path / "out/onnx/model.onnx")
    sizes = {each.name: each.shape for each in session.get_inputs() if "past" in each.name}
    assert list(sizes)[:2] == ["past_key_values.0.key", "past_key_values.0.value"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer(TEXTS[2], return_tensors="np")["input_ids"]
    assert ids.tolist() == AutoTokenizer.from_pretrained(folder)([TEXTS[2]])["input_ids"]
    expected = logits(model, tokenizer, TEXTS[2])
    names = [each.name.replace("present", "past_key_values") for each in session.get_outputs()]
    for padding in (0, 3):
        past = {name: np.zeros((1, s[1], 0, s[3]), np.float32) for name, s in sizes.items()}
        given = np.concatenate([np.zeros((1, padding), np.int64), ids[:, :5]], axis=1)
        mask = np.array([[0] * padding + [1] * 5])
        for number in range(5, ids.shape[1] + 1):
            found = session.run(None, {"input_ids": given, "attention_mask": mask, **past})
            assert np.abs(found[0][0, -1] - expected[number - 1]).max() < 1e-4
            past = dict(zip(names[1:], found[1:], strict=True))
            given, mask = ids[:, number : number + 1], np.append(mask, [[1]], axis=1)


@pytest.mark.apart
@pytest.mark.parametrize("kind", KINDS)
def test_the_card_continues_a_text_in_node(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's code continues a text in Node. `apart`, as it fetches transformers.js from npm."""
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    npm = shutil.which("npm") or pytest.skip("needs npm")
    words = ("install", "--ignore-scripts", "--no-audit", "--no-fund", TRANSFORMERS_JS)
    subprocess.run([npm, *words], cwd=tmp_path, check=True, capture_output=True)
    folder, out = decoder(kind, tmp_path / "student"), tmp_path / "out"
    assert run(folder, "--to", "onnx", "--out", out).exit_code == 0
    _, _, block = (out / "README.md").read_text().partition("```js\n")
    code = block.partition("```")[0].replace("max_new_tokens: 40", "max_new_tokens: 9")
    as_json = "console.log = (x) => process.stdout.write(JSON.stringify(x));"
    (out / "card.mjs").write_text(as_json + code.replace("9", "9, do_sample: false"))
    printed = printed_by("node", "card.mjs", cwd=out)
    expected = pipeline("text-generation", str(folder))(
        "Once upon a time", max_new_tokens=9, do_sample=False
    )
    assert json.loads(printed) == expected


def test_llama_cpp_predicts_what_the_student_does(
    each_kind: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and tokens; an export that is too coarse is refused, and the card's lines run."""
    pytest.importorskip("llama_cpp")
    student = load_student(each_kind)
    gguf.write_float(student, tmp_path / "model.gguf")
    batch = student.encode(TEXTS)
    present = batch["attention_mask"].astype(bool)
    found = gguf.open_runner(tmp_path / "model.gguf", "logits")(batch)
    assert np.abs(found - student.run(batch))[present].max() < 0.01  # its cache is in float16
    texts = [*ENGLISH, *RUSSIAN, *TEXTS]
    assert gguf.token_ids(tmp_path / "model.gguf", texts) == [
        list(each) for each in student.tokenizer(texts)["input_ids"]
    ]
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    out = tmp_path / "out"
    result = run(each_kind, "--to", "gguf", "--quantize", "q8_0", "--out", out)
    assert result.exit_code == 0, result.output
    about = json.loads((out / "export.json").read_text())
    (made,) = about["files"]
    assert made["file"] == "gguf/model-q8_0.gguf" and 0.999 < made["keeps"] < 1
    coarse = ("--to", "gguf", "--quantize", "q4_0", "--least", 0.9999)
    said = refused(each_kind, *coarse, "--out", tmp_path / "no")
    assert "--quantize q4_0: agreement" in said and "--keep-float" in said
    monkeypatch.chdir(out)
    names: dict[str, Any] = {}
    for block in (out / "README.md").read_text().split("```python\nfrom llama_cpp")[1:]:
        code = f"from llama_cpp{block.partition('```')[0]}"
        exec(code.replace("print(", "written = ("), names)  # continue a text, then chat
    assert names["written"]["role"] == "assistant"


def test_pieces_without_probability_hide_no_difference(
    student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student may exclude pieces by -inf; 0 times the logarithm of 0 is NaN, and must not hide a
    difference."""
    loaded = load_student(student)
    run = loaded.run
    monkeypatch.setattr(type(loaded), "run", lambda self, batch: without_piece(batch))

    def without_piece(batch: dict[str, Array]) -> Array:
        logits = run(batch).copy()
        logits[..., 7] = -np.inf
        return logits

    share = export_check(loaded, None).share
    assert share(without_piece) == 1
    assert share(lambda batch: np.maximum(without_piece(batch), -50)) > 0.999
    assert share(lambda batch: np.zeros_like(run(batch))) < 0.99


def test_k_quants_match_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """k-quants equal llama.cpp's: rows of 256 values have the requested type, and rows of 64
    the type that llama.cpp uses instead. Errors fall with more bits, and the file runs."""
    pytest.importorskip("llama_cpp")
    wide = decoder("llama:256x1x4x64x2", tmp_path / "wide")
    gguf.write_float(load_student(wide), tmp_path / "model.gguf")
    read = {t.name: np.asarray(t.data) for t in GGUFReader(tmp_path / "model.gguf").tensors}
    layers = gguf.layers(tmp_path / "model.gguf")
    nodes = [name for names in layers.values() for name in names]
    errors = []
    for kind, narrow in K_QUANT_FALLBACKS.items():
        gguf.quantise(tmp_path / "model.gguf", tmp_path / kind, kind, nodes)
        for tensor in GGUFReader(tmp_path / kind).tensors:
            if tensor.name in nodes:
                columns = read[tensor.name].shape[1]
                assert tensor.tensor_type.name.lower() == (kind if columns == 256 else narrow)
        (up,) = (t for t in GGUFReader(tmp_path / kind).tensors if t.name == "blk.0.ffn_up.weight")
        values = dequantize(up.data, up.tensor_type)
        errors.append(np.abs(values - read[up.name]).mean() / np.abs(read[up.name]).mean())
    assert 0.001 < errors[0] < errors[1] < errors[2] < 0.1
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    out = tmp_path / "out"
    result = run(wide, "--to", "gguf", "--quantize", "q4_k", "--least", 0.8, "--out", out)
    assert result.exit_code == 0, result.output
    (made,) = json.loads((out / "export.json").read_text())["files"]
    assert made["file"] == "gguf/model-q4_k.gguf" and 0.8 < made["keeps"] < 1


def test_k_quants_need_rows_of_their_blocks(student: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    words = ("--to", "gguf", "--quantize", "q4_k", "--out", tmp_path / "no")
    said = refused(student, *words)
    assert "rows with a multiple of 256" in said and "64, 96; give --quantize q5_0" in said


@pytest.mark.usefixtures("without_llama_cpp")
def test_k_quants_need_llama_cpp(student: Path, tmp_path: Path) -> None:
    said = refused(student, "--to", "gguf", "--quantize", "q4_k", "--out", tmp_path / "no")
    assert "--quantize q4_k" in said and "pip install llama-cpp-python" in said


@pytest.mark.usefixtures("without_llama_cpp")
def test_a_comparison_needs_llama_cpp(student: Path, tmp_path: Path) -> None:
    """Without it, --check and --least would have no effect on a GGUF file."""
    lines = tmp_path / "lines.txt"
    lines.write_text("a\n")
    for words in (("--least", 0.5), ("--check", lines)):
        said = refused(student, "--to", "onnx", "--to", "gguf", *words, "--out", tmp_path / "no")
        assert f"{words[0]} {words[1]}: needs llama_cpp" in said
        assert f"pip install llama-cpp-python`, or leave {words[0]} out" in said


@pytest.mark.slow
def test_onnx_in_int8_is_checked_by_bits_a_byte(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachonce.student_export.job.costs_of", lambda *_: UNMEASURED)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(ENGLISH[:8]) + "\n")
    words = ("--to", "onnx", "--quantize", "int8", "--check", lines, "--least", 0.9)
    result = run(shallow, *words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (made,) = json.loads((tmp_path / "out/export.json").read_text())["files"]
    own = score_lm(str(shallow), {TEST: lines}, LmSettings(), lambda line: None)
    assert made["score"] == pytest.approx(own["mean"][TEST]["bits_per_byte"], rel=0.02)
    assert f"{made['score']:.3f} bits/byte" in result.stdout
    assert 0.9 < made["keeps"] < 1


def test_what_gguf_cannot_hold_is_refused(
    student: Path, tiny_teacher: Teachers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--to", "gguf", "--out", tmp_path / "out")
    said = refused(student, *words, "--quantize", "int8")
    assert "--quantize int8: gguf does not support it; give --quantize f16 or q8_0 or" in said
    assert "q4_0, or give --to onnx or openvino, or leave --quantize out" in said
    said = refused(tiny_teacher("gpt2"), *words)
    assert "has no end-of-text token" in said
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'teachonce[gguf]'" in refused(student, *words)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "llama-bpe"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}, "gpt-2"),
        ({"normalizer": {"type": "Lowercase"}}, None),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": None}, None),
    ],
)
def test_only_patterns_that_llama_cpp_knows(change: dict[str, Any], name: str | None) -> None:
    settings = json.loads(train_byte_level(ENGLISH, 300, "llama-bpe").to_str()) | change
    if name is not None:
        assert pattern_of(settings, "student") == name
        return
    with pytest.raises(UserError, match="gpt-2, llama-bpe, qwen2, smollm"):
        pattern_of(settings, "student")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "activation function gelu"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type linear"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"student: {message} .* use convert_hf_to_gguf.py .*onnx"):
        architecture_of(LlamaConfig(**config), "student")
    with pytest.raises(UserError, match="is a gemma2, .* use convert_hf_to_gguf.py of llama.cpp$"):
        architecture_of(Gemma2Config(), "student")
    with pytest.raises(UserError, match="is a mamba, and --to gguf writes llama, qwen2"):
        architecture_of(MambaConfig(), "student")
