"""Stores of causal teachers, and decoders that continue training on them.

- Stores of causal teachers have the next-token values of transformers.
- A decoder with its own weights and vocabulary continues training on a store of another teacher.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from teachonce.checkpoints.first_token import prepend_token
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import Features, FeatureStore, StoreError, open_store
from teachonce.store.tools.show import Pieces
from teachonce.student_train.arguments import checked_from, with_store_defaults
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.data.distributions import TargetReader
from teachonce.student_train.losses.next_token import NextTargets
from teachonce.student_train.model.decoder_sizes import shape_of_folder
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.student_train.prepared_student import prepare
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.shapes import SHAPES
from teachonce.student_train.train.training_log import TrainingLog
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job import features, part_writing, plan
from teachonce.teacher_dump.teacher.heads import observed_logprobs
from teachonce.training import byte_level
from tests.end_to_end.support import invoke, ok, refused, report_of, says
from tests.making.decoders import FAMILIES, save_decoder
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.texts import GERMAN

CAPS = {"Gemma2": 3.0, "Gemma3nText": 3.0}
PLAIN = {"attention": "none", "hidden": "none", "codec": "exact"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("causal") / "corpus.txt", 24)


def live_logits(model: Path, store: FeatureStore) -> list[Floats]:
    """Return the logits [T,V] of each sequence by transformers."""
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for record in store:
            ids = torch.from_numpy(record.token_ids.astype(np.int64))[None]
            found.append(teacher(ids).logits[0].numpy())
    return found


def live_logprobs(model: Path, store: FeatureStore) -> list[Floats]:
    logits = live_logits(model, store)
    return [each - np.logaddexp.reduce(each, axis=1, keepdims=True) for each in logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_token_that_follows_in_several_families(tmp_path: Path, family: str) -> None:
    model = save_decoder(tmp_path / "model", family)
    corpus = write_corpus(tmp_path / "corpus.txt", 6)
    known: list[Floats] = []
    for tier in ("topk:5", "sample:20"):
        path = dumped(model, corpus, tmp_path / f"{tier[:4]}.zarr", logits=tier, **PLAIN)
        store = open_store(path)
        assert store.features.logits is not None and store.features.logits.observed
        known = known or live_logprobs(model, store)
        for record, live in zip(store, known, strict=True):
            observed = record.views[0].logits.observed
            expected = live[np.arange(len(live) - 1), record.token_ids[1:]]
            assert np.abs(observed[:-1] - expected).max() < 1e-4 and observed[-1] == -np.inf
        said = ok(feature_store, "verify", path, "--model", model, "--device", "cpu")
        assert "view0/logits/observed" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_all_logits_from_the_head_in_several_families(tmp_path: Path, family: str) -> None:
    """Some families scale or cap their logits."""
    model, cap = save_decoder(tmp_path / "model", family), CAPS.get(family)
    corpus = write_corpus(tmp_path / "corpus.txt", 6)
    path = dumped(model, corpus, tmp_path / "a.zarr", logits="head", **PLAIN)
    store = open_store(path)
    spec, (weight, bias) = store.features.logits, store.head()
    assert spec is not None and spec.cap == spec.to_json().get("cap") == cap
    known = live_logits(model, store)
    for record, live in zip(store, known, strict=True):
        logits = record.views[0].logits
        assert np.abs(spec.capped(logits.values @ weight.T + bias) - live).max() < 1e-4
        assert np.abs(logits.log_partition - np.logaddexp.reduce(live, axis=1)).max() < 1e-4
        shown = Pieces(store).best(record.views[0], 2)
        assert [best[0][0] for best in shown] == live.argmax(axis=1).tolist()
    reader = TargetReader(np.arange(len(weight)), (weight, bias), spec)
    targets, _ = reader.shared_of(store[0].views[0].logits, np.arange(3))
    assert np.abs(targets.logits.numpy() - known[0][:3]).max() < 1e-4
    config = json.loads(store.teacher_file("config.json"))
    assert config.get("final_logit_softcapping") == cap
    if cap:
        ok(feature_store, "verify", path, "--model", model, "--device", "cpu")


@pytest.mark.slow
def test_a_token_in_front_gives_the_first_one_a_row(tmp_path: Path, corpus: Path) -> None:
    model = save_decoder(tmp_path / "model", "Llama", bos="<end>")
    words: tuple[Any, ...] = ("--model", model, "--corpus", corpus, "--attention", "none")
    words = (*words, "--logits", "topk:600", "--codec", "exact", "--device", "cpu", "--out")
    path = tmp_path / "a.zarr"
    assert "<end> (600) in front of each window (--bos)" in ok(teacher_dump, *words, path)
    store = open_store(path)
    assert store.identity["arguments"]["bos"] == 600
    for record, live in zip(store, live_logprobs(model, store), strict=True):
        assert record.token_ids[0] == 600 and record.special.tolist()[:2] == [True, False]
        assert record.offsets[0].tolist() == [0, 0] and not record.special[1:].any()
        observed = record.views[0].logits.observed
        assert abs(observed[0] - live[0, record.token_ids[1]]) < 1e-4
    ok(feature_store, "verify", path, "--model", model, "--device", "cpu")
    assert "nothing to do" in ok(teacher_dump, *words, path)
    # Another token in front is of another model, and `verify` has no --bos to leave out.
    other = Path(shutil.copytree(model, tmp_path / "other"))
    tokenizer = AutoTokenizer.from_pretrained(other)
    prepend_token(tokenizer, "3", "other")
    tokenizer.save_pretrained(other)
    line = refused(feature_store, "verify", path, "--model", other, "--device", "cpu")
    says(line, "read token 600 in front of each window", "give the model that it was made with")
    plain = tmp_path / "plain.zarr"
    ok(teacher_dump, *words, plain, "--bos", "none")
    assert not any(record.special.any() for record in open_store(plain))
    counts = []
    for each in (path, plain):
        batches = StudentBatches(
            each, "300", student="llama:32x2x4", loss={"kl-next": 1.0}, batch_tokens=10**6
        )
        batch = next(iter(batches))
        targets = batch.aligned["bytes"].logits
        assert isinstance(targets, NextTargets)
        counts.append(len(targets.rest))
    assert counts[0] - counts[1] == len(batch.inputs.ids) > 20  # one additional token for each text


def test_the_token_in_front_is_checked(tmp_path: Path, corpus: Path) -> None:
    model = save_decoder(tmp_path / "model", "Llama", bos_token_id=3)
    words: tuple[Any, ...] = ("--model", model, "--corpus", corpus, "--out", tmp_path / "a.h5")
    says(refused(teacher_dump, *words, "--bos", "first"), "--bos first", "auto, none or the id")
    line = refused(teacher_dump, *words, "--bos", "99999")
    says(line, "no such token; give the id of one, or leave")
    says(refused(teacher_dump, *words, "--head", "mlm"), "no masked-LM head", "give --head causal")
    says(refused(teacher_dump, *words, "--bos", "9" * 11), "--bos 99999999999", "auto, none or")
    says(refused(teacher_dump, *words, "--bos", "3", "--head", "none"), "--bos 3", "causal head")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert prepend_token(tokenizer, "auto", "m") is None  # without the record that it read a bos
    assert prepend_token(tokenizer, "5", "m") == 5
    assert tokenizer("a", text_pair="b")["input_ids"][0] == 5
    assert prepend_token(tokenizer, "5", "m") is None
    with pytest.raises(UserError, match="in front of each text itself; leave --bos out"):
        prepend_token(tokenizer, "6", "m")


def test_overlapping_windows_are_learnt_once(tmp_path: Path, tiny_teacher: Teachers) -> None:
    corpus = tmp_path / "long.txt"
    corpus.write_text("\n".join(" ".join(GERMAN[i::3] * 4) for i in range(3)) + "\n", "utf-8")
    words = {**PLAIN, "logits": "topk:599", "max_length": 64}
    model = tiny_teacher("gpt2")
    store = open_store(dumped(model, corpus, tmp_path / "a.zarr", stride=24, **words))
    assert store.features.context
    assert "first tokens of windows that only give context" in ok(feature_store, "info", store.path)
    seen: dict[int, int] = {}
    for record in store:
        new = record.document_begin + record.offsets[record.context :]
        end = seen.get(record.document, 0)
        assert new[0, 0] == end and 0 <= record.context <= 30  # everything exactly once
        assert (record.document_begin > 0) == (record.context > 0)
        seen[record.document] = int(new[-1, 1])
    documents = corpus.read_text("utf-8").splitlines()
    assert [seen[n] for n in range(3)] == [len(text) for text in documents]
    batches = StudentBatches(
        store.path, "300", student="llama:32x2x4", loss={"next": 1.0, "kl-next": 1.0}
    )
    (raw,) = store.gather([np.arange(len(store))])
    batch = batches.collator.for_validation(raw, 0, (0,))
    targets = batch.aligned["bytes"].logits
    assert isinstance(targets, NextTargets)
    assert len(targets.rest) <= len(batch.labels) < batch.tokens * 0.8
    read = sum(len(text.encode()) for text in documents)
    # A student's piece that starts in the context is excluded, with its part beyond the context.
    assert 0.95 * read < batch.predicted_bytes <= read
    ok(feature_store, "verify", store.path, "--model", model, "--device", "cpu")
    small = tmp_path / "small.h5"
    ok(feature_store, "convert", store.path, small, "--codec", "small")
    assert [r.context for r in open_store(small)] == [r.context for r in store]


@pytest.mark.slow
def test_it_goes_through_every_command(
    tmp_path: Path, corpus: Path, tiny_teacher: Teachers
) -> None:
    model, more = tiny_teacher("gpt2"), write_corpus(tmp_path / "more.txt", 9)
    one, two = (
        dumped(model, text, tmp_path / f"{text.stem}.zarr", attention="none", logits="topk:8")
        for text in (corpus, more)
    )
    small, both = tmp_path / "small.h5", tmp_path / "both.h5"
    ok(feature_store, "convert", one, small, "--codec", "small")
    ok(feature_store, "merge", one, two, both, "--recode")
    stores = [open_store(path) for path in (one, two, small, both)]
    rows = [np.concatenate([r.views[0].logits.observed for r in each]) for each in stores]
    assert np.array_equal(rows[0], rows[2]) and np.array_equal(np.append(*rows[:2]), rows[3])
    streamed = {
        number: batch.logits.observed[batch.start[place] : batch.start[place + 1]].copy()
        for batch in stores[3].stream(batch_tokens=300)
        for place, number in enumerate(batch.index.tolist())
        if batch.logits
    }
    assert np.array_equal(np.concatenate([streamed[n] for n in sorted(streamed)]), rows[3])
    assert "whose own log-probability is stored" in ok(feature_store, "info", small)
    for path in (one, small, both):
        ok(feature_store, "verify", path, "--model", model, "--device", "cpu")


def test_values_of_another_token_are_found(
    tmp_path: Path, corpus: Path, tiny_teacher: Teachers
) -> None:
    """Log-probabilities that are shifted by one are valid values of the wrong tokens."""

    def shifted(decoder: Any, values: Any, following: Floats, partition: Floats) -> Floats:
        return observed_logprobs(decoder, values, np.roll(following, -1), partition)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writing, "observed_logprobs", shifted)
        path = dumped(tiny_teacher("gpt2"), corpus, tmp_path / "a.zarr", **PLAIN)
    found = invoke(feature_store, "verify", path)
    line = "view0/logits/observed is not the log-probability of the next token"
    assert found.exit_code == 1 and line in found.output
    with pytest.raises(StoreError, match="observed is not the log-probability"):
        for batch in open_store(path).stream(check=True):
            assert batch.logits is not None


def test_a_store_of_an_earlier_release_goes_on(
    tmp_path: Path, corpus: Path, tiny_teacher: Teachers
) -> None:
    """It lacks the new arrays, and neither its other parts nor a grown store get any."""
    model, path = tiny_teacher("gpt2"), tmp_path / "a.zarr"
    words: tuple[Any, ...] = ("--model", model, "--corpus", corpus, "--attention", "none")
    words = (*words, "--logits", "topk:4", "--device", "cpu", "--out")
    real = features.features_of

    def earlier(*given: Any) -> Features:
        found = real(*given)
        assert found.logits is not None
        logits = dataclasses.replace(found.logits, observed=False, ranked=False)
        return dataclasses.replace(found, logits=logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "features_of", earlier)
        ok(teacher_dump, *words, path)
    assert "nothing to do" in ok(teacher_dump, *words, path)
    grown = tmp_path / "grown.zarr"
    ok(teacher_dump, *words, grown, "--grow-from", path)
    logits = json.loads((grown / "zarr.json").read_text())["attributes"]["features"]["logits"]
    assert logits == {"tier": "topk", "size": 4, "next_token": True}
    says(refused(teacher_dump, *words, tmp_path / "b.zarr", "--logits", "topk:0"), "topk:0")


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
        made_for = {
            name: student_tokenizer("300", store, family=name) for name in byte_level.FAMILIES
        }
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


def test_output_embeddings_that_the_config_denies(
    causal: Path, models: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(models / "untied", tmp_path / "model"))
    folder = changed(copy, "config.json", tie_word_embeddings=True)
    given = ("--store", causal, "--student", folder, "--out", tmp_path / "s", *SHORT)
    says(refused(student_train, *given), "is true", "have an lm_head.weight", "correct it to false")
