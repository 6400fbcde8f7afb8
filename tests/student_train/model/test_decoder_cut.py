"""Decoders that start from layers of a teacher, cut to their sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.arguments import checked_from
from teachonce.student_train.model import start_checks
from teachonce.student_train.model.decoder_cut import chosen_heads, largest, spread_layers
from teachonce.student_train.model.decoder_sizes import (
    Sizes,
    check_cut,
    copied_settings,
    shape_of_folder,
)
from teachonce.student_train.model.freezing import group_of
from teachonce.student_train.model.start_checks import resolved_start
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import parse_student
from teachonce.support.errors import UserError
from tests.making.dumps import dumped, write_corpus
from tests.making.models import trained_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e5},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e5},
    "gpt2": {"layer_norm_epsilon": 1e-4},
}
GROUPS = {"llama": "x2", "qwen2": "x2", "qwen3": "x2x16", "gpt2": ""}
"""The end of a shape: key-value heads, and the size of heads that do not fill the hidden size."""
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2"}
LIVE = torch.arange(1, 32, 2)
HEADS, UNITS, LAYER = (0, 3), tuple(range(5, 37)), 1
"""The channels in which anything is of the teachers; heads, units and a layer that do nothing."""


def teacher_of(kind: str) -> Any:
    """Make a random decoder of four layers, with some zeroed heads and units and one zeroed
    layer."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
    sizes |= {"n_inner" if kind == "gpt2" else "intermediate_size": 48}
    sizes |= {"max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"vocab_size": len(trained_tokenizer("bpe-plain"))}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(
        **{**sizes, "tie_word_embeddings": True, **SIZES[kind]}
    )
    torch.manual_seed(3)
    name = "GPT2LMHeadModel" if kind == "gpt2" else f"{CLASSES[kind]}ForCausalLM"
    model = getattr(transformers, name)(config)
    channels = torch.zeros(32).index_fill_(0, LIVE, 1.0)
    for name, weight in model.base_model.named_parameters():
        if "norm" in name or "ln_" in name:
            continue
        weight.data.normal_(0, 0.15)
        if "wte" in name or "wpe" in name or "embed" in name:
            weight.data *= channels
        if "o_proj" in name or "down_proj" in name or "c_proj" in name:
            turned = kind != "gpt2" and weight.ndim == 2
            written = weight.data.T if turned else weight.data  # from heads or units to channels
            written *= channels * (f".{LAYER}." not in name)
            if weight.ndim == 2 and "attn" in name:
                size = len(written) // 4
                written[[size * head + n for head in HEADS for n in range(size)]] = 0.0
            elif weight.ndim == 2:
                written[list(UNITS)] = 0.0
    return model.half().float().eval()  # values that a store represents exactly


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("decoders"), {}
    for kind in CLASSES:
        teacher_of(kind).save_pretrained(root / kind)
        trained_tokenizer("bpe-plain").save_pretrained(root / kind)
        found[kind] = root / kind
    return found


@pytest.fixture(scope="module")
def stores(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    corpus = write_corpus(root / "corpus.txt", 12)
    words: dict[str, Any] = {"attention": "none", "hidden": "none", "logits": "topk:4"}
    return {k: dumped(path, corpus, root / f"{k}.zarr", **words) for k, path in folders.items()}


def student_of(store: Path, student: str, **words: Any) -> tuple[Any, list[str]]:
    """Return a student with its initial weights."""
    options: dict[str, Any] = {"vocab": "teacher", "loss": {"next": 1.0}, "device": "cpu"}
    with open_store(store) as opened:
        given = TrainOptions(str(store), student=student, **options | words)
        model, _, lines = prepare(given, opened)
    return model.eval(), lines


def tied(folder: Path) -> Any:
    """Save the teacher with its word embeddings as output embeddings."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([list(range(5, 45))])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3"])
def test_a_student_of_the_same_sizes_is_its_teacher(
    stores: dict[str, Path], folders: dict[str, Path], kind: str
) -> None:
    """So are the epsilon of its norms and its rotary positions, in transformers 4 as well. Only its
    output embeddings are always its word embeddings."""
    student, lines = student_of(stores[kind], f"{kind}:32x4x4x48{GROUPS[kind]}", init="teacher")
    model = tied(folders[kind])
    torch.testing.assert_close(logits(student), logits(model), atol=2e-5, rtol=0)
    assert lines[0].startswith("word embeddings of 600 of 600 pieces")
    assert lines[1] == "layers 1, 2, 3, 4 of 4; 32 of 32 channels, 4 of 4 heads, 48 of 48" + (
        " feed-forward units"
    )
    if kind in ("llama", "qwen2"):
        assert json.loads(student.config.to_json_string())["rope_theta"] == 1e5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "qwen3"])
def test_what_contributes_nothing_is_cut_first(
    stores: dict[str, Path], folders: dict[str, Path], kind: str
) -> None:
    """The rest of the teacher remains, and each norm covers half of the channels."""
    shape = f"{kind}:16x3x2x16{GROUPS[kind]}"
    student, lines = student_of(stores[kind], shape, init="layers:1,3,4")
    assert "layers 1, 3, 4 of 4; 16 of 32 channels, 2 of 4 heads, 16 of 48 feed-forward" in lines[1]
    assert "by the activations of " in lines[1]
    model = tied(folders[kind])
    words = model.get_input_embeddings().weight[:, LIVE]
    assert torch.equal(student.get_input_embeddings().weight, words)
    if kind == "gpt2":
        units = [place for place in range(48) if place not in UNITS]
        own, theirs = (each.transformer.h for each in (student, model))
        assert torch.equal(own[1].mlp.c_fc.weight, theirs[2].mlp.c_fc.weight[LIVE][:, units])
        values = own[2].attn.c_attn.weight[:, 32:48]
        assert torch.equal(values, theirs[3].attn.c_attn.weight[LIVE][:, 64 + 8 : 64 + 24])
        return
    for name, module in model.named_modules():
        if "layernorm" in name or name == "model.norm":
            module.weight.data *= 0.5**0.5
            module.variance_epsilon /= 2
    torch.testing.assert_close(logits(student), logits(model), atol=1e-4, rtol=0)


def test_a_student_of_its_teachers_sizes_has_its_heads(stores: dict[str, Path]) -> None:
    options = checked_from({"store": (str(stores["qwen3"]),), "student": "teacher:2"})
    assert options.student == "qwen3:32x2x4x48x2x16"
    with open_store(stores["qwen3"]) as store:
        assert resolved_start("auto", parse_student(options.student), store) == "teacher"


def test_heads_with_common_keys_stay_together() -> None:
    def chosen(best: list[int], own: tuple[int, int]) -> tuple[list[int], list[int]]:
        importance = np.isin(np.arange(9), best) + 0.01 * np.arange(9)
        theirs = Sizes(576, 9, 3, 64, 1)
        heads, groups = chosen_heads(importance, theirs, Sizes(64 * own[0], *own, 64, 1))
        return heads.tolist(), groups.tolist()

    assert chosen([], (9, 3)) == (list(range(9)), [0, 1, 2])
    assert chosen([0, 1, 7, 8], (4, 2)) == ([0, 1, 7, 8], [0, 2])
    assert chosen([3], (3, 1)) == ([3, 4, 5], [1])
    assert chosen([0, 3, 4], (3, 3)) == ([0, 4, 3], [0, 1, 1])


def test_layers_and_places() -> None:
    assert spread_layers(30, 4) == [1, 11, 20, 30]
    assert spread_layers(4, 4) == [1, 2, 3, 4] and spread_layers(4, 1) == [1]
    assert largest(np.array([1.0, 3.0, 3.0, 0.0]), 2).tolist() == [1, 2]
    with pytest.raises(UserError, match="student has 5 layers, the teacher only 4"):
        spread_layers(4, 5)


def test_a_vocabulary_of_its_own_is_in_the_channels_of_the_layers(stores: dict[str, Path]) -> None:
    student, lines = student_of(
        stores["llama"], "llama:16x2x2x16", init="teacher", vocab="400", max_length=32
    )
    assert lines[0] == "word embeddings of 398 of 400 pieces from their splits"
    with open_store(stores["llama"]) as store:
        theirs = np.asarray(store.teacher_weights()["embed_tokens.weight"], np.float32)
        place = store.tokenizer().token_to_id("a")
    own = student.get_input_embeddings().weight.detach().numpy()
    wanted = theirs[place][LIVE]
    assert (np.abs(own - wanted).max(axis=1) < 1e-6).sum() == 1


@pytest.mark.parametrize(
    ("student", "start"),
    [
        ("llama:16x2x2x24x1", "layers 1, 4 of 4"),
        ("llama:16x2x4x24x2", "word embeddings"),  # another head size
        ("llama:16x5x2x24x1", "word embeddings"),  # more layers than the teacher
        ("qwen3:16x2x2x24x1", "word embeddings"),
    ],
)
def test_auto_cuts_where_it_can(stores: dict[str, Path], student: str, start: str) -> None:
    _, said = student_of(stores["llama"], student)
    assert said[-1].startswith(start)


def test_auto_does_not_run_a_large_teacher(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(stores["llama"]) as store:
        shape, weights = parse_student("llama:16x2x2x24x1"), store.teacher_weights()
        layers = sum(weights[name].size for name in weights if "proj" in name)
        for limit, how in ((layers, "teacher"), (layers - 1, "auto")):
            monkeypatch.setattr(start_checks, "CUT_BY_DEFAULT", limit)
            assert resolved_start("auto", shape, store) == how


def test_layers_of_a_folder(stores: dict[str, Path], folders: dict[str, Path]) -> None:
    """They equal the store's, which may lack the weights."""
    how = f"layers:1,4@{folders['llama']}"
    one, lines = student_of(stores["llama"], "llama:16x2x2x16", init=how)
    other, _ = student_of(stores["llama"], "llama:16x2x2x16", init="layers:1,4")
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name
    assert lines[2].startswith("all of llama, weights ")


@pytest.mark.parametrize(
    ("student", "config", "said"),
    [
        ("gpt2:16x2x2", {}, "the teacher is a llama and the student a gpt2; .* --student llama:"),
        ("llama:16x2x2", {"model_type": "opt"}, "the teacher is a opt .*: use --init vocab"),
        (
            "llama:16x2x4",
            {},
            "have size 8, the student's 4, .* llama:HxLxAxFxKVx8, or llama:HxLxA with H = 8 A$",
        ),
        ("llama:16x2x4x40x4x8", {}, "^$"),
        ("gpt2:16x2x4", {"model_type": "gpt2"}, "have size 8, .* gpt2:HxLxA with H = 8 A$"),
        ("llama:16x2x4x64x4x8", {}, "size is 64, .* llama:HxLxAxFxKVx8 with F = 48 or less"),
        ("llama:24x2x6x16x2x4", {"head_dim": 4, "num_attention_heads": 8}, "^$"),
        ("llama:24x2x3x16x1x16", {"head_dim": 16}, "3 query .*:HxLxAxFxKVx16 with .* as 3"),
        ("llama:40x2x5", {}, "the student's hidden size is 40, and the teacher has 32"),
        ("llama:16x2x2x64", {}, "size is 64, .* the teacher has 48; .* llama:HxLxAxF with F = 48 "),
        ("llama:24x2x3x16x1", {}, "3 query heads share .* such as 3"),
        ("llama:32x2x4x16x4", {"num_key_value_heads": 1}, "^$"),
        ("llama:16x2x2x16", {"rope_scaling": {"type": "dynamic"}}, "of the type dynamic, expected"),
        ("llama:16x2x2x16", {"rope_scaling": {"type": "llama3"}}, "of the type llama3, expected"),
        ("llama:16x2x2x16", {"hidden_size": "32"}, "hidden_size in its config.json is '32'"),
        ("llama:16x2x2x16", {"num_attention_heads": 0}, "num_attention_heads .* is 0, expected"),
        ("llama:16x2x2x16", {"attention_bias": True}, "attention_bias .* of the teacher is True, "),
        ("llama:16x2x2x16", {"attention_bias": False, "mlp_bias": 3}, "mlp_bias .* is 3, .* False"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_line(
    student: str, config: dict[str, Any], said: str
) -> None:
    teacher = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}
    teacher |= {"num_key_value_heads": 2, "intermediate_size": 48, **config}
    shape = parse_student(student)
    if said == "^$":
        check_cut("teacher", shape, teacher, "the teacher")
        return
    with pytest.raises(UserError, match=said):
        check_cut("teacher", shape, teacher, "the teacher")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_weight_of_a_decoder_is_in_a_part_that_can_be_frozen(kind: str) -> None:
    words = "transformer.wte" if kind == "gpt2" else "model.embed_tokens"
    ends = {"student.model.norm", "student.transformer.ln_f", "student.lm_head"}
    for name, _ in teacher_of(kind).named_parameters(prefix="student"):
        owner, _, _ = name.rpartition(".")
        if owner == f"student.{words}":
            assert group_of(name) == "words"
        elif owner == "student.transformer.wpe":
            assert group_of(name) == "positions"
        elif owner in ends:
            assert group_of(name) == "head"
        else:
            layer = int(owner.partition(".h." if kind == "gpt2" else ".layers.")[2].split(".")[0])
            assert group_of(name) == f"layers.{layer + 1}"


def test_rotary_positions_are_read_as_either_transformers_writes_them() -> None:
    four = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    four |= {"original_max_position_embeddings": 8192}

    def rotary(**config: Any) -> Any:
        return copied_settings({"model_type": "llama", **config})["rope_parameters"]

    found = rotary(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **four})
    assert found == {"rope_type": "llama3", "rope_theta": 5e5, **four}
    assert rotary(rope_parameters=found) == found
    assert rotary() == {"rope_type": "default", "rope_theta": 10000.0}
    for wrong in ("linear", ["default"], {"rope_type": ["default"]}):
        for name in ("rope_scaling", "rope_parameters"):
            with pytest.raises(UserError, match="--init: the .*rotary positions .* --init vocab"):
                rotary(**{name: wrong})
    # The decoder may be the folder of `--student` instead of the teacher.
    with pytest.raises(UserError, match="positions of the copied decoder are of the type linear"):
        rotary(rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UserError, match=r"--student d: the model in this folder is a \['llama'\]"):
        shape_of_folder({"model_type": ["llama"]}, "d", "--student d")


def test_weights_that_do_not_fit_their_config(stores: dict[str, Path]) -> None:
    with open_store(stores["llama"]) as store:
        weights = dict(store.teacher_weights().items())
        for name, values, said in (
            ("norm.weight", None, "the teacher's weights lack norm.weight"),
            (
                "norm.weight",
                np.ones(31, np.float16),
                r"has shape \[31\], but .* by its config.json",
            ),
        ):
            changed = {n: v for n, v in weights.items() if n != name}
            changed |= {} if values is None else {name: values}
            with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=said):
                patch.setattr(FeatureStore, "teacher_weights", lambda _, new=changed: new)
                student_of(stores["llama"], "llama:16x2x2x16", init="teacher")
