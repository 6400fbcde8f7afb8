"""Settings for scores in a CrossEncoder folder are applied, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.checkpoints.fields import LENGTHS, SETTINGS
from teachonce.checkpoints.loading import load_with_tokenizer
from teachonce.checkpoints.names import resolve_model
from teachonce.checkpoints.sentence_settings import declared_activation
from teachonce.store import open_store
from teachonce.store.format.features import SEVERAL_LABELS
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.downstream.support import done, refused
from tests.downstream.tasks.test_sts import alike
from tests.end_to_end.support import ok
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.texts import ENGLISH

PAIRS = (
    ("The OLD stories", "were long"),
    ("A house", "by the Sea"),
    ("short", "also short"),
    (ENGLISH[0], ENGLISH[6]),
)
IDENTITY = "torch.nn.modules.linear.Identity"
SCORES: dict[str, Any] = {"head": "score", "logits": None, "text_column": "one,two"}


def saved(
    tiny_teacher: Teachers, folder: Path, labels: tuple[str, ...] = ("s",), **settings: Any
) -> Path:
    """Save a folder with the installed CrossEncoder, which stores its activation in SETTINGS."""
    from sentence_transformers import CrossEncoder

    base = tiny_teacher("bert", "classification", labels)
    CrossEncoder(str(base), device="cpu", **settings).save_pretrained(str(folder))
    return folder


def predicted(folder: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict(PAIRS)


def scores(folder: Path, tmp_path: Path) -> Any:
    corpus = tmp_path / "pairs.csv"
    corpus.write_text("\n".join(["one,two", *(",".join(pair) for pair in PAIRS)]) + "\n", "utf-8")
    store = open_store(dumped(folder, corpus, tmp_path / "a.zarr", **SCORES))
    return store, np.array([record.views[0].class_logits[0] for record in store])


def test_scores_are_those_of_the_library(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Scores follow the activation, the lower-casing and the maximum length (12 tokens, although
    the tokenizer allows 128) of the folder."""
    folder = saved(tiny_teacher, tmp_path / "m", activation_fn=torch.nn.Identity())
    changed(folder, LENGTHS, max_seq_length=12)
    before = predicted(folder)
    changed(folder, LENGTHS, do_lower_case=True)
    wanted = predicted(folder)
    assert not np.allclose(before, wanted, atol=1e-3)
    store, found = scores(folder, tmp_path)
    assert np.allclose(found, wanted, atol=1e-6)
    assert max(len(record.token_ids) for record in store) == 12
    about = store.teacher_settings("config.json")["sentence_transformers"]
    assert about["activation_fn"] == IDENTITY
    tokenizer, _ = load_with_tokenizer(resolve_model(str(folder)), "classification")
    assert tokenizer("OLD")["input_ids"] == tokenizer("old")["input_ids"]
    assert tokenizer.model_max_length == 12


def test_a_reranker_is_not_taken_for_an_embedding_model(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """`teacher-dump` offers no vectors; `downstream --task sts` names the task that scores it."""
    folder, table = saved(tiny_teacher, tmp_path / "m"), alike(tmp_path / "test.tsv", 8, 0)
    plan = ("--corpus", table, "--text-column", "text_a,text_b", "--device", "cpu", "--plan")
    assert "embedding" not in ok(teacher_dump, "--model", folder, *plan, "--out", tmp_path / "a.h5")
    words = ("--task", "sts", "--as-is", "--model", folder, "--test", table)
    line = refused(*words, "--out", tmp_path / "sts")
    assert f"{folder}: is a CrossEncoder ({SETTINGS}), which gives no vector of a text" in line
    assert "`downstream --task pair --as-is` scores a reranker" in line
    changed(folder, SETTINGS, model_type="SparseEncoder")
    line = refused(*words, "--out", tmp_path / "sts")
    assert "is a SparseEncoder" in line and line.endswith("give an embedding model")
    changed(folder, SETTINGS, model_type="CrossEncoder")
    done("--task", "pair", *words[2:], "--out", tmp_path / "pair")


def test_what_the_library_does_by_itself_is_not_noted(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    teacher = load_teacher(str(folder), head="score", attention="none")
    assert not hasattr(teacher.config, "sentence_transformers")
    several = saved(tiny_teacher, tmp_path / "n", ("a", "b"), activation_fn=torch.nn.Sigmoid())
    task = load_teacher(str(several), head="classification", attention="none").task
    assert task and task.problem_type == SEVERAL_LABELS


Spoil = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("spoil", "line"),
    (
        (
            lambda f: changed(f, SETTINGS, prompts={"q": "find: "}, default_prompt_name="q"),
            "default_prompt_name is 'q' in .*set default_prompt_name to null",
        ),
        (
            lambda f: changed(f, SETTINGS, activation_fn="os.system"),
            "is 'os.system' in config_sentence_transformers.json, expected a class of torch.nn",
        ),
        (
            lambda f: changed(f, SETTINGS, activation_fn="torch.nn.functional.Sigmoid"),
            "is 'torch.nn.functional.Sigmoid' in config_sentence",
        ),
        (
            lambda f: changed(f, "config.json", sentence_transformers={"activation_fn": "os.fork"}),
            "is 'os.fork' in config.json",
        ),
        (
            lambda f: changed(f, "config.json", sbert_ce_default_activation_function="os.fork"),
            "is 'os.fork' in config.json",
        ),
        (
            lambda f: changed(f, LENGTHS, transformer_task="text-generation"),
            "transformer_task is 'text-generation'",
        ),
        (
            lambda f: (f / "modules.json").write_text(
                '[{"type": "sentence_transformers.X.Transformer", "path": ""},'
                ' {"type": "sentence_transformers.X.LogitScore", "path": "1"}]'
            ),
            "a CrossEncoder of the modules Transformer, LogitScore",
        ),
    ),
)
def test_settings_that_are_refused(
    tiny_teacher: Teachers, tmp_path: Path, spoil: Spoil, line: str
) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    spoil(folder)
    with pytest.raises(UserError, match=line):
        load_teacher(str(folder), head="score", attention="none")


def test_an_activation_in_a_store_is_checked() -> None:
    """An untrusted store cannot name an arbitrary function as the activation of a CrossEncoder."""
    for good in (IDENTITY, "torch.nn.Sigmoid", None):
        config = SimpleNamespace(sentence_transformers={"activation_fn": good})
        assert declared_activation("s.zarr", config) == good
    with pytest.raises(UserError, match=r"s\.zarr: the activation .* is 'os\.system'"):
        declared_activation(
            "s.zarr", SimpleNamespace(sbert_ce_default_activation_function="os.system")
        )


def test_a_cross_encoder_makes_no_vectors(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = saved(tiny_teacher, tmp_path / "m")
    with pytest.raises(UserError, match="model_type is 'CrossEncoder' .*--head score"):
        load_teacher(str(folder), head="embedding", attention="none")
