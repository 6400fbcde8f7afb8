"""The model card contains the student's origin, and nothing about this machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel

from teachonce.store import FeatureStore, open_store
from teachonce.store.format.features import TaskSpec
from teachonce.store.tools.store_card import teacher_name
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.output.card import hub_id
from teachonce.student_train.output.card_code import how_to_embed, how_to_load
from tests.end_to_end.support import STUDENT, ok, report_of
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers, Tokenizers

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, tiny_teacher: Teachers, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the id of a model in the hub's cache."""
    repository = tmp_path / "hub" / "models--acme--mini"
    shutil.copytree(tiny_teacher("bert"), repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "acme/mini"


def card(store: str | Path, folder: Path, *more: str) -> str:
    words = ("--store", store, "--vocab", "450", "--steps", "2", "--out", folder / "student")
    ok(student_train, *words, *STUDENT, *more)
    return (folder / "student" / "README.md").read_text()


def test_a_name_that_the_hub_does_not_allow_is_no_base_model() -> None:
    """A store is untrusted: a line break in the name of its teacher would be metadata."""
    names = ("acme/mini", "bert-base", "a: b", "a\nlicense: mit", "/home/me/bert", "", 3)
    stores: list[Any] = [
        SimpleNamespace(
            identity={"teacher": {"revision": "1a2b"}},
            teacher_settings=lambda _, name=name: {"_name_or_path": name},
        )
        for name in names
    ]
    assert [*map(hub_id, stores)] == ["acme/mini", "bert-base", *[None] * 5]


def test_a_teacher_of_the_hub_is_the_base_model(hub: str, tmp_path: Path) -> None:
    store = dumped(Path(hub), write_corpus(tmp_path / "corpus.txt", 20), tmp_path / "store.zarr")
    text = card(store, tmp_path)
    assert "\n# Masked language model, student of acme/mini\n" in text
    data = ModelCard.load(tmp_path / "student/README.md").data
    assert (data["base_model"], data["base_model_relation"]) == ("acme/mini", "finetune")
    report = report_of(tmp_path / "student")["result"]
    results = vars(data)["eval_results"]
    scores = {each.metric_name: each.metric_value for each in results}
    # `hidden`, `similarity` and others are losses: no reader takes them for scores.
    assert {each.metric_type for each in results} == {"loss", "mlm_per_character"}
    assert scores["mlm"] == report["valid_mlm"] and scores["loss"] == report["valid_loss"]
    assert {each.task_type for each in results} == {"fill-mask"}
    assert open_store(store).identity["teacher"]["revision"] == COMMIT


def test_a_teacher_of_this_machine_is_not(
    store: FeatureStore, tiny_teacher: Teachers, tmp_path: Path
) -> None:
    text = card(store.path, tmp_path, "--student", "bert:32x2x4")
    assert "base_model" not in text and "model, student of bert\n" in text
    assert "| store | store.zarr |" in text
    for folder in (tmp_path, Path(store.path).parent, tiny_teacher("bert").parent):
        assert str(folder) not in text
    assert "pipeline_tag: fill-mask\n" in text and "A masked language model of " in text
    assert "`AutoModelForMaskedLM` loads it as well. No pooler was trained:\n" in text
    (call,) = re.findall(r"`AutoModel(\.from_pretrained\(.*?\))` leaves it out", text)
    call = call.replace("this folder", str(tmp_path / "student"))
    model = eval(f"AutoModel{call}", {"AutoModel": AutoModel})
    assert model(torch.tensor([[1, 2]])).pooler_output is None
    for figure, printed in (
        ("mlm", "is in nats per masked token"),
        ("mlm_per_character", "divides it by the number of characters of the masked tokens"),
        ("hidden", "is in squared standard deviations of a channel"),
    ):
        assert f"`valid_{figure}` {printed}" in text
    assert "`valid_kl`" not in text  # not one of its losses


def test_a_tagger_of_entities_is_read_by_words(make_tokenizer: Tokenizers) -> None:
    """transformers merges neighbours of one part of speech, but not words with IOB tags."""
    for labels, by_words in (("O", "B-PER", "I-PER"), True), (("NOUN", "VERB", "X"), False):
        spec = TaskSpec("tagging", labels)
        student = make_student("32x1x4", make_tokenizer("wordpiece"), 64, task=spec)
        assert ('aggregation_strategy="first"' in how_to_load(student)) == by_words


def test_a_head_that_no_loss_trained_fills_no_mask(
    store: FeatureStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = card(store.path, tmp_path, "--loss", "hidden=1")
    assert "pipeline_tag: feature-extraction\n" in text and "fill-mask" not in text
    assert "# Encoder of texts, student of bert\n" in text
    assert "Its head over the vocabulary was not trained: no loss of the training reads it." in text
    code = text.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(code.replace("this folder", str(tmp_path / "student")), {})
    assert capsys.readouterr().out.startswith("tensor([[[")


def test_a_loss_without_a_unit_has_none_in_the_card(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = """from torch.nn.functional import smooth_l1_loss
from teachonce.losses import Loss
PLAIN = Loss("plain", smooth_l1_loss, teacher="normalised", student="runs", unit="",
             projection="always")
"""
    (tmp_path / "loss_without_unit.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = card(store.path, tmp_path, "--loss", "mlm=1,loss_without_unit:PLAIN=3")
    assert "| valid_loss_without_unit:PLAIN | " in text
    assert "`valid_mlm` is in nats per masked token; `valid_mlm_per_character` divides" in text
    assert "is in ;" not in text and "`valid_loss_without_unit:PLAIN`" not in text


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        ("work/tagger/model", "tagger/model"),  # as `downstream --save` writes it
        ("work/tagger", "tagger"),
        ("model", "model"),
        ("/home/ann/model", "model"),  # no card names the folders of a machine
        (None, "an unnamed teacher"),
    ],
)
def test_a_teacher_is_named_by_its_folder(teacher: str | None, name: str) -> None:
    assert teacher_name({"teacher": {"id": teacher}}) == name


def test_only_encoders_are_loaded_by_the_auto_class(make_tokenizer: Tokenizers) -> None:
    """`AutoModel` has no class for word vectors, which sentence-transformers alone loads."""
    tokenizer = make_tokenizer("wordpiece")
    assert "AutoModel" not in how_to_embed(make_student("static:16", tokenizer, 64))
    with_layers = how_to_embed(make_student("32x1x4", tokenizer, 64))
    assert "`AutoModel` loads the encoder only, without pooling" in with_layers


@pytest.mark.parametrize("size", ["gpt2:32x1x4", "llama:32x1x4"])
def test_the_code_of_a_decoders_card_stays_within_its_positions(
    size: str, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """A GPT-2 has an embedding for each position, and the pipeline would write 256 tokens."""
    tokenizer = make_tokenizer("bpe-plain")
    student = make_student(size, tokenizer, 64)
    student.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", how_to_load(student), re.S)
    assert "max_new_tokens=32" in code
    exec(code.replace("this folder", str(tmp_path)), {})


@pytest.mark.parametrize("task", [None, "classification", "tagging"])
@pytest.mark.parametrize("size", ["32x1x4", "modernbert:32x1x4", "bilstm:8,8"])
def test_the_code_of_the_card_loads_the_student_and_predicts(
    size: str,
    task: str | None,
    make_tokenizer: Tokenizers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = make_tokenizer("wordpiece")
    labels = ("NOUN", "VERB", "X")
    spec = TaskSpec(task, labels) if task else None
    student = make_student(size, tokenizer, 64, task=spec)
    student.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = how_to_load(student)
    found_code = re.search(r"```python\n(.*?)```", text, re.S)
    assert found_code
    code = found_code[1].replace("this folder", str(tmp_path))
    made = {None: "MaskedLM", "classification": "SequenceClassification"}
    name = f"For{made.get(task, 'TokenClassification')}"
    if size.startswith("bilstm"):
        assert "import teachonce.checkpoints.bilstm\n" in code
        assert f"Its class, `BiLstm{name}`" in text
    else:
        assert "student_train" not in text and f"`AutoModel{name}` loads it" in text
    capsys.readouterr()
    exec(code, {})
    said = eval(capsys.readouterr().out, {"np": np})
    if task is None:
        assert len(said) > 1 and {found["token_str"] for found in said} <= {*tokenizer.get_vocab()}
    elif task == "classification":
        assert [found["label"] in labels for found in said] == [True]
    else:
        assert {found["word"] for found in said} <= {*tokenizer.get_vocab()}
        assert len(said) > 1 and {found["entity"] for found in said} <= {*labels}
