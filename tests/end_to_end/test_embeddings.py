"""`--head embedding`, as it is typed: its output, verification and refusals, also with states of
tokens."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job import part_writing
from teachonce.teacher_dump.job.option_values import Shard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.sharing import share
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed, modules, normalize, pooling
from tests.making.texts import ENGLISH

CONFIG = "config_sentence_transformers.json"


def test_dumped_printed_and_compared(embedder: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "a.txt", tmp_path / "a.zarr"
    corpus.write_text("\n".join([*ENGLISH, " ".join(ENGLISH), "", "\u200b"]), encoding="utf-8")
    words = ("--model", embedder, "--corpus", corpus, "--out", out, "--head", "embedding")
    message = ok(teacher_dump, *words, "--prompt", "query", "--max-length", 60, "--device", "cpu")
    vectors = "embedding of width 32 (mean, length 1, prompt 'find: '), hidden none, attention none"
    cut = "1 of 14 texts longer than the window (--max-length) and cut: 41.8%"
    says(message, vectors, cut, "1 empty line")
    store = open_store(out)
    assert [r.text for r in store][: len(ENGLISH)] == [f"find: {text}" for text in ENGLISH]
    assert f"find: {' '.join(ENGLISH)}".startswith(store[len(ENGLISH)].text)
    assert len(store[len(ENGLISH)].token_ids) == 60
    message = ok(feature_store, "verify", out, "--model", embedder, "--device", "cpu")
    says(message, "sequence/embedding, 1 - cosine", "every error is within")
    says(ok(feature_store, "info", out), "embedding   size 32, mean, of length 1, prompt 'find: '")
    says(ok(feature_store, "show", out, "0"), "embedding of length 0.999")


def test_a_dump_without_the_vectors_of_an_embedder_says_so(embedder: Path, tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a.txt", 4), tmp_path / "a.zarr"
    words = ("--model", embedder, "--corpus", corpus, "--out", out, "--device", "cpu")
    said = f"{embedder} is a sentence embedding model, and its vectors are not stored; --head"
    says(ok(teacher_dump, *words, "--plan"), f"note      {said} embedding stores them")
    assert said not in ok(teacher_dump, *words, "--plan", "--head", "embedding")
    broken = shutil.copytree(embedder, tmp_path / "broken")
    (broken / CONFIG).write_text("{")
    assert "note" not in ok(teacher_dump, "--model", broken, *words[2:], "--plan")


def test_prompts_that_are_not_used_are_named(embedder: Path, tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a.txt", 4), tmp_path / "a.zarr"
    words = ("--model", embedder, "--corpus", corpus, "--out", out, "--device", "cpu", "--plan")
    said = "prompt    none, but the model has query; give --prompt NAME, or --prompt ''"
    says(ok(teacher_dump, *words, "--head", "embedding"), said)
    for prompt in ("", "document", "query"):
        printed = ok(teacher_dump, *words, "--head", "embedding", "--prompt", prompt)
        assert "prompt    none" not in printed
    copy = shutil.copytree(embedder, tmp_path / "e")
    chosen = changed(copy, CONFIG, default_prompt_name="document")  # whose text is empty
    printed = ok(teacher_dump, "--model", chosen, *words[2:], "--head", "embedding")
    assert "prompt    none" not in printed


def test_another_model_is_reported(embedder: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    out = dumped(
        embedder, write_corpus(tmp_path / "a.txt", 8), tmp_path / "a.h5",
        head="embedding", logits=None,
    )  # fmt: skip
    other = modules(pooling("max"), base=tiny_teacher("bert"), folder=tmp_path / "other")
    line = refused(feature_store, "verify", out, "--model", other)
    says(line, "pooling is 'mean' in the store and 'max' here; give the model")
    behind = (pooling("mean"), normalize())
    unlike = modules(*behind, base=tiny_teacher("electra"), folder=tmp_path / "unlike")
    assert "Error" in refused(feature_store, "verify", out, "--model", unlike)


def test_beside_states_in_several_views_and_stopped(embedder: Path, tmp_path: Path) -> None:
    """The vectors are of the plain view, and equal a dump without states."""
    corpus = write_corpus(tmp_path / "a.txt", 40, ENGLISH)
    both = dumped(
        embedder, corpus, tmp_path / "a.zarr",
        head="embedding", logits=None, hidden="layer:4", attention="mean", views=2, codec="exact",
    )  # fmt: skip
    alone = dumped(
        embedder, corpus, tmp_path / "b.zarr",
        head="embedding", logits=None, codec="exact", part_tokens=300,
    )  # fmt: skip
    one, other = open_store(both), open_store(alone)
    assert one.features.hidden == ("layer4",) and one.features.attention == ("mean",)
    assert len(other.manifest.parts) > 2 and not other.features.has_token_features
    assert np.allclose(one.embeddings(), other.embeddings(), atol=1e-5)
    record = one[0]
    state = record.views[0].hidden["layer4"].mean(axis=0)
    assert np.allclose(record.embedding, state / np.linalg.norm(state), atol=1e-5)
    assert verify(both).problems == verify(alone).problems == []


@pytest.mark.slow
def test_it_goes_on_after_a_stop(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, and as one of several that share the store."""
    corpus = write_corpus(tmp_path / "a.txt", 40, ENGLISH)
    asked: dict[str, Any] = {"head": "embedding", "logits": None, "part_tokens": 300}
    wanted = open_store(dumped(embedder, corpus, tmp_path / "whole.zarr", **asked))
    out, whole = tmp_path / "cut.zarr", part_writing.write_part

    def cut(*given: Any) -> None:
        if given[2].number == 2:
            raise UserError("the disk is full")
        whole(*given)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
        patch.setattr(part_writing, "write_part", cut)
        dumped(embedder, corpus, out, **asked)
    assert dumped(embedder, corpus, out, **asked) == out
    shared = tmp_path / "shared.zarr"
    share(dump_options(embedder, corpus, shared, **asked), Shard(0, 1))
    for path in (out, shared):
        assert open_store(path).manifest.content() == wanted.manifest.content()


@pytest.mark.parametrize(
    "words, message",
    (
        (("--prompt", "query", "--max-length", "4"), "the prompt 'find: ' alone is 6 tokens"),
        (("--prompt", "title"), "has no such prompt; it has: document, query"),
    ),
)
def test_refused(embedder: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 4)
    given = ("--model", embedder, "--corpus", corpus, "--out", tmp_path / "a.zarr")
    says(refused(teacher_dump, *given, "--head", "embedding", *words), message)
    assert not (tmp_path / "a.zarr").exists()


def test_no_pooling_and_none_asked_for(tiny_teacher: Teachers, tmp_path: Path) -> None:
    corpus, base = write_corpus(tmp_path / "a.txt", 4), tiny_teacher("bert")
    given = ("--model", base, "--corpus", corpus, "--out", tmp_path / "a.zarr")
    says(refused(teacher_dump, *given, "--head", "embedding"), "no pooling in it", "give --pooling")
    message = ok(teacher_dump, *given, "--head", "embedding", "--pooling", "cls", "--device", "cpu")
    says(message, "embedding of width 32 (cls)")
    assert open_store(tmp_path / "a.zarr").identity["arguments"]["pooling"] == "cls"
    ok(feature_store, "verify", tmp_path / "a.zarr", "--model", base, "--device", "cpu")


def test_minilm_is_dumped_for_its_vectors_where_nothing_is_asked_for() -> None:
    def features(**asked: str) -> tuple[str, str, str]:
        options = DumpOptions("minilm", Path("a.zarr"), **asked)  # type: ignore[arg-type]
        assert dataclasses.replace(options, seed=3).head == options.head
        return options.head, options.hidden, options.attention

    assert features() == ("embedding", "layer:6", "none")
    assert features(head="embedding") == ("embedding", "none", "none")
    assert features(hidden="mean") == ("auto", "mean", "mean")
    assert features(logits="none") == ("auto", "mean", "mean")
    with pytest.raises(UserError, match="unknown feature 'best'"):
        features(hidden="best")
