"""A decoder with weights and a vocabulary of its own goes on from a store of another teacher."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from teachonce.store import open_store
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.output.report import read_report
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.training_log import TrainingLog
from tests.end_to_end.support import invoke, ok, refused, says

SHORT = ("--steps", "2", "--batch-tokens", "512", "--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def model(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 300 pieces, four rows of padding behind them, and another rotary base."""
    folder = tmp_path_factory.mktemp("models") / "own"
    with open_store(causal) as store:
        student_tokenizer("300", store, pattern="llama-bpe").save_pretrained(folder)
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    for weight in made.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    made.save_pretrained(folder)
    return folder


def test_it_starts_with_all_of_its_weights(causal: Path, model: Path) -> None:
    options = TrainOptions(
        str(causal), student="llama:32x2x4x48x2", vocab=str(model), init=f"folder:{model}",
        loss={"next": 1.0}, device="cpu",
    )  # fmt: skip
    with open_store(causal) as store:
        student, collator, lines = prepare(options, store)
    assert lines[-1].startswith("all weights of own, ") and collator.max_length == 64
    ids = torch.arange(5, 45)[None]
    theirs: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        own = student.eval()(input_ids=ids).logits
        torch.testing.assert_close(own, theirs(input_ids=ids).logits[..., :300], atol=1e-5, rtol=0)


def test_it_is_trained_as_a_folder_of_the_same_kind(
    causal: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "student"
    said = ok(student_train, "--store", causal, "--student", model, "--out", out, *SHORT)
    assert "llama:32x2x4x48x2" in said and "lr 0.0004" in said
    report = read_report(out)
    assert report is not None and report["result"]["valid_bits_per_byte"] > 3
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_theta"]) == (64, 5000.0)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == (
        AutoTokenizer.from_pretrained(model).get_vocab()
    )
    assert str(model.parent) not in (out / "README.md").read_text()


def test_low_rank_changes_are_trained_alone_and_added(
    causal: Path, model: Path, tmp_path: Path
) -> None:
    """Linear layers change by matrices of the rank, nothing else changes, the folder is an ordinary
    one, and a stopped training ends with the same weights."""
    pytest.importorskip("peft")
    words = ("--store", causal, "--student", model, "--lora", "3", *SHORT[2:])
    steps = ("--steps", "6", "--checkpoint-every", "2", "--eval-every", "3")
    said = ok(student_train, *words, *steps, "--out", tmp_path / "whole")
    assert "low-rank changes of rank 3" in said and "lr 0.004" in said
    before, after = (load_file(each / "model.safetensors") for each in (model, tmp_path / "whole"))
    assert before.keys() == after.keys()
    for name, values in before.items():
        change = after[name] - values[: len(after[name])]
        linear = name.endswith("_proj.weight")
        assert (torch.linalg.matrix_rank(change, atol=1e-6) == 3) if linear else not change.any()
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    add = TrainingLog.add

    def add_and_stop(log: TrainingLog, values: dict[str, float], step: int) -> None:
        add(log, values, step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLog, "add", add_and_stop)
        result = invoke(student_train, *words, *steps, "--out", stopped)
    assert result.exit_code == 130 and "saved at step" in result.output
    ok(student_train, *words, *steps, "--out", stopped, "--resume")
    assert (stopped / "model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()


def test_low_rank_changes_need_weights_that_are_trained(causal: Path, tmp_path: Path) -> None:
    given = ("--store", causal, "--lora", "4", "--student", "llama:32x2x4", "--out", tmp_path / "s")
    says(refused(student_train, *given, *SHORT), "--lora 4", "--init is auto", "--student DIR")


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ({}, ("--vocab", "400"), ("--vocab 400", "for its own vocabulary", "--init vocab")),
        ({}, ("--max-length", "65"), ("--max-length 65", "64 positions", "give --max-length 64")),
        ({"model_type": "bert"}, (), ("is a bert", "llama, qwen3")),
        ({"model_type": "t5", "is_encoder_decoder": True}, (), ("is a t5", "holds a decoder")),
        (
            {"tie_word_embeddings": False},
            (),
            ("tie_word_embeddings False", "or a shape such as"),
        ),
        ({"head_dim": 16}, (), ("heads of size 16", "fill the hidden size")),
        ({"num_hidden_layers": 3}, (), ("lacks weights", "layers.2.")),
        ({"mlp_bias": True}, (), ("mlp_bias in the config.json", "is True", "--init vocab")),
    ],
)
def test_what_cannot_go_on_is_refused(
    causal: Path, model: Path, tmp_path: Path, config: dict[str, Any], words: Any, told: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, **config}))
    given = ("--store", causal, "--student", folder, "--out", tmp_path / "s", *SHORT)
    says(refused(student_train, *given, *words), *told)
