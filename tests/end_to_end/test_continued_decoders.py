"""A decoder with its own weights and vocabulary continues training on a store of another
teacher."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from teachonce.store import open_store
from teachonce.student_train.arguments import checked_from, with_store_defaults
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.decoder_sizes import shape_of_folder
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import SHAPES
from teachonce.student_train.train.training_log import TrainingLog
from teachonce.support.errors import UserError
from teachonce.training.byte_level import FAMILIES
from tests.end_to_end.support import invoke, ok, refused, report_of, says
from tests.making.sentence_folders import changed

WEIGHTS = "model.safetensors"
SHORT = ("--steps", "2", "--batch-tokens", "512", "--device", "cpu", "--precision", "fp32")


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "own": ("llama:32x2x4x48x2", {}),
    "untied": ("llama:32x2x4x48x2", {"tie_word_embeddings": False}),
    "biased": ("qwen2:32x2x4x48x2", {}),
    "wide": ("qwen3:32x2x4x48x2x16", {"head_dim": 16}),
    "uneven": (
        "qwen3:32x2x3x48x1x10",
        {"head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
}
"""The shapes of some decoders, and how their configs differ from that of the first."""


@pytest.fixture(scope="module")
def models(causal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save decoders with 300 pieces, four padding rows in the embeddings, and another rotary
    base."""
    folder = tmp_path_factory.mktemp("models")
    with open_store(causal) as store:
        made_for = {name: student_tokenizer("300", store, family=name) for name in FAMILIES}
    for name, (shape, changes) in MODELS.items():
        torch.manual_seed(2)
        sizes = {
            "vocab_size": 304,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "tie_word_embeddings": True,
        }
        kind = shape.partition(":")[0]
        config = getattr(transformers, f"{kind.title()}Config")(**sizes | changes)
        made = getattr(transformers, f"{kind.title()}ForCausalLM")(config)
        for weight in made.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
        made.save_pretrained(folder / name)
        made_for[SHAPES[kind].family].save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return models / "own"


@pytest.mark.parametrize("name", MODELS)
def test_it_starts_with_all_of_its_weights(causal: Path, models: Path, name: str) -> None:
    model, shape = models / name, MODELS[name][0]
    options = TrainOptions(
        str(causal), student=shape, vocab=str(model), init=f"folder:{model}",
        loss={"next": 1.0}, device="cpu",
    )  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    assert shape_of_folder(config, str(model), "--student") == shape
    with open_store(causal) as store:
        student, collator, lines = prepare(options, store)
    assert lines[-1].startswith(f"all weights of {name}, ") and collator.max_length == 64
    ids = torch.arange(5, 45)[None]
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.no_grad():
        own = student.eval()(input_ids=ids).logits
        torch.testing.assert_close(own, theirs(input_ids=ids).logits[..., :300], atol=1e-6, rtol=0)


def test_python_takes_a_folder_as_the_command_does(causal: Path, model: Path) -> None:
    command = checked_from({"store": (str(causal),), "student": str(model)})
    given = TrainOptions(causal, student=str(model))
    with open_store(causal) as store:
        python = with_store_defaults(given, [store])
    assert python.student == MODELS["own"][0]
    assert python.describing() == command.describing()
    with open_store(causal) as store:
        low_rank = with_store_defaults(TrainOptions(causal, student=str(model), lora=2), [store])
    assert low_rank.init == f"folder:{model}"
    own = StudentBatches(causal, "300", student=str(model)).options
    assert (own.student, own.vocab, own.init) == (python.student, "300", "auto")
    batches = StudentBatches(causal, student=str(model))
    assert batches.options.student == python.student and batches.options.vocab == str(model)
    assert batches.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    with pytest.raises(UserError, match="--recurrent-dropout 0.1: applies only to a BiLSTM"):
        TrainOptions(causal, student=str(model), recurrent_dropout=0.1)


@pytest.mark.parametrize("name", ["own", "untied", "biased", "wide"])
def test_it_is_trained_as_a_folder_of_the_same_kind(
    causal: Path, models: Path, tmp_path: Path, name: str
) -> None:
    out, model = tmp_path / "student", models / name
    said = ok(student_train, "--store", causal, "--student", model, "--out", out, *SHORT)
    assert MODELS[name][0] in said and "lr 0.0004" in said
    for part in ("embed_tokens", "lm_head"):  # with one row for each piece, and trained
        after = {key.split(".")[-2]: rows for key, rows in load_file(out / WEIGHTS).items()}
        before = {key.split(".")[-2]: rows for key, rows in load_file(model / WEIGHTS).items()}
        assert (part in after) == (part == "embed_tokens" or name == "untied")
        assert part not in after or not torch.equal(after[part], before[part][:300])
    assert report_of(out)["result"]["valid_bits_per_byte"] > 3
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_theta"]) == (64, 5000.0)
    own, theirs = (AutoTokenizer.from_pretrained(each).get_vocab() for each in (out, model))
    assert own == theirs
    assert str(model.parent) not in (out / "README.md").read_text()


@pytest.mark.parametrize("name", ["own", "untied"])
def test_low_rank_changes_are_trained_alone_and_added(
    causal: Path, models: Path, tmp_path: Path, name: str
) -> None:
    """The folder is an ordinary one, and a stopped training ends with the same weights."""
    pytest.importorskip("peft")
    model = models / name
    words = ("--store", causal, "--student", model, "--lora", "3", *SHORT[2:])
    steps = ("--steps", "6", "--checkpoint-every", "2", "--eval-every", "3")
    said = ok(student_train, *words, *steps, "--out", tmp_path / "whole")
    assert "low-rank changes of rank 3" in said and "lr 0.004" in said
    before, after = (load_file(each / "model.safetensors") for each in (model, tmp_path / "whole"))
    assert before.keys() == after.keys()
    for key, values in before.items():
        change = after[key] - values[: len(after[key])]
        linear = key.endswith("_proj.weight")
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
    assert (stopped / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ({}, ("--vocab", "400"), ("--vocab 400", "for its own vocabulary", "--init vocab")),
        ({}, ("--max-length", "65"), ("--max-length 65", "64 positions", "give --max-length 64")),
        ({}, ("--lora", "17"), ("--lora 17", "has size 16", "give --lora 16 or less")),
        ({"model_type": "bert"}, (), ("is a bert", "llama, qwen2, qwen3")),
        ({"model_type": "t5", "is_encoder_decoder": True}, (), ("is a t5", "only for decoders")),
        ({"model_type": "gemma2"}, (), ("is a gemma2", "or --student llama:256x4x4")),
        (
            {"tie_word_embeddings": False},
            (),
            ("is false", "no lm_head.weight", "correct it to true"),
        ),
        ({"head_dim": 16}, (), ("have other sizes than its config.json declares",)),
        ({"head_dim": 7}, (), ("has llama:32x2x4x48x2x7: heads of size 7", "such as 8")),
        ({"num_key_value_heads": 3}, (), ("4 heads are not a multiple of 3 key-value heads",)),
        ({"num_hidden_layers": 0}, (), ("has llama:32x0x4x48x2: ", "and all at least 1")),
        ({"attention_bias": True}, (), ("attention_bias in", "llama:256x4x4 --init vocab")),
        ({"num_hidden_layers": 3}, (), ("lacks 9 weights", "layers.2.")),
        ({"mlp_bias": True}, (), ("mlp_bias in the config.json", "is True", "--init vocab")),
    ],
)
def test_what_cannot_go_on_is_refused(
    causal: Path, model: Path, tmp_path: Path, config: dict[str, Any], words: Any, message: Any
) -> None:
    folder = changed(Path(shutil.copytree(model, tmp_path / "model")), "config.json", **config)
    given = ("--store", causal, "--student", folder, "--out", tmp_path / "s", *SHORT)
    says(said := refused(student_train, *given, *words), *message)
    # The suggested command can be typed.
    for remedy in re.findall(r"--student llama:256x4x4(?: --init vocab)?", said):
        typed = dict(zip(remedy.split()[::2], remedy.split()[1::2], strict=True))
        checked_from({"store": (str(causal),), **{k[2:]: v for k, v in typed.items()}})


def test_a_program_is_refused_what_the_command_is(
    causal: Path, model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    folder = changed(copy, "config.json", attention_bias=True)
    student, start = MODELS["own"][0], f"folder:{folder}"
    given: dict[str, Any] = {"student": student, "init": start, "vocab": str(folder)}
    with open_store(causal) as store, pytest.raises(UserError, match="attention_bias in the conf"):
        prepare(TrainOptions(str(causal), loss={"next": 1.0}, **given), store)


def test_output_embeddings_beside_a_config_that_denies_them(
    causal: Path, models: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(models / "untied", tmp_path / "model"))
    folder = changed(copy, "config.json", tie_word_embeddings=True)
    given = ("--store", causal, "--student", folder, "--out", tmp_path / "s", *SHORT)
    says(refused(student_train, *given), "is true", "have an lm_head.weight", "correct it to false")
