"""Teachers of text vectors, and students that approximate and search them.

- `--head embedding`, as it is typed: its output, verification and refusals, also with states of
  tokens.
- Students of text vectors: sentence-transformers folders that approximate the teacher's vectors.
- Students of vectors in searches: every kind ranks texts, and only students in the teacher's space
  search the teacher's vectors.
"""

import dataclasses
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.downstream.cli import main as downstream
from teachonce.feature_store.cli import main as feature_store
from teachonce.store import open_store
from teachonce.store.tools.verify import verify
from teachonce.student_train.arguments import checked_from, with_store_defaults
from teachonce.student_train.batches import StudentBatches
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.output.run import run
from teachonce.student_train.plan.vector_space import inherited_settings
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.sweep.cli import main as student_sweep
from teachonce.student_train.train.evaluate import _VectorPairs
from teachonce.student_train.train.student_training import train
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.job import part_writing
from teachonce.teacher_dump.job.option_values import ProcessShard
from teachonce.teacher_dump.job.options import DumpOptions
from teachonce.teacher_dump.job.sharing import share
from tests.downstream.search.collections import collection
from tests.end_to_end.support import Words, ok, refused, report_of, says
from tests.making.dumps import dump_options, dumped, write_corpus
from tests.making.environment import printed_by
from tests.making.models import Stores, Teachers
from tests.making.sentence_folders import (
    PROMPTS,
    changed,
    mean_embedder,
    modules,
    normalize,
    pooling,
)
from tests.making.texts import ENGLISH
from tests.student_train.support import prepared, resume, same_weights, stop

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
    line = refused(teacher_dump, *words, "--logits", "topk:4")
    says(line, "has no LM head; give --logits none to store only hidden states and attention maps")
    says(ok(teacher_dump, *words, "--plan", "--logits", "none"), "logits none", "hidden mean,")
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
    says(line, "pooling is mean in the store and max here; give the model")
    unlike = mean_embedder(tiny_teacher("electra"), tmp_path / "unlike")
    assert "Error" in refused(feature_store, "verify", out, "--model", unlike)


def test_with_states_in_several_views_and_stopped(embedder: Path, tmp_path: Path) -> None:
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
    out, whole = tmp_path / "cut.zarr", part_writing.dump_part

    def cut(*given: Any) -> None:
        if given[2].number == 2:
            raise UserError("the disk is full")
        whole(*given)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is full"):
        patch.setattr(part_writing, "dump_part", cut)
        dumped(embedder, corpus, out, **asked)
    assert dumped(embedder, corpus, out, **asked) == out
    shared = tmp_path / "shared.zarr"
    share(dump_options(embedder, corpus, shared, **asked), ProcessShard(0, 1))
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
    # Whether states are stored depends on the head: not for a decoder.
    assert features(hidden="mean") == ("auto", "mean", "auto")
    assert features(logits="none") == ("auto", "auto", "auto")
    assert features(head="mlm") == ("mlm", "mean", "mean")
    with pytest.raises(UserError, match="unknown feature 'best'"):
        features(hidden="best")


VOCAB: Words = ("--vocab", "450", "--student", "32x2x4", "--device", "cpu")


@pytest.fixture(scope="module")
def stores(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function stores(prompt, **changes) that makes a store of 32-dimensional sentence
    vectors."""
    root = tmp_path_factory.mktemp("vectors")
    corpus = write_corpus(root / "corpus.txt", 120, ENGLISH)

    @cache
    def store(prompt: str | None = None, **changes: Any) -> Path:
        asked = {"head": "embedding", "logits": None, "prompt": prompt} | changes
        return dumped(embedder, corpus, root / f"{len(list(root.iterdir()))}.zarr", **asked)

    return store


def encoded(folder: Path, texts: list[str], **more: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=7, **more)


def angles(vectors: Any) -> Any:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (unit @ unit.T)[np.triu_indices(len(unit), 1)]


@pytest.mark.slow
def test_a_student_says_what_its_teacher_says(stores: Callable[..., Path], tmp_path: Path) -> None:
    """It has the teacher's vectors, in its space, for texts after the teacher's prompt."""
    store = stores("query")
    printed = ok(
        student_train, "--store", store, "--out", tmp_path / "s", *VOCAB,
        "--steps", "120", "--batch-texts", "24", "--student", "bert:24x1x2",
    )  # fmt: skip
    says(printed, "1 embedding + 10 similarity", "valid_embedding", "valid_similarity")
    says(printed, "layers 1+2+3+4 of 4, cut to 24", "valid_spearman needs 30 held-out texts")
    fs = open_store(store)
    texts = [text.removeprefix(PROMPTS["query"]) for text in fs.texts()]
    vectors, wanted = encoded(tmp_path / "s", texts), fs.embeddings()
    assert vectors.shape == (120, 32) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors * wanted).sum(axis=1).mean() > 0.9
    ok(
        student_train, "--store", store, "--out", tmp_path / "r", *VOCAB,
        "--steps", "0", "--init", "random", "--student", "bert:24x1x2",
    )  # fmt: skip
    trained, started = (
        np.corrcoef(angles(v), angles(wanted))[0, 1]
        for v in (vectors, encoded(tmp_path / "r", texts))
    )
    assert trained > max(0.5, started + 0.1)
    unprompted = encoded(tmp_path / "s", texts, prompt_name="document")
    assert not np.allclose(vectors, unprompted, atol=1e-3)
    settings = json.loads((tmp_path / "s" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == PROMPTS and settings["default_prompt_name"] == "query"
    report = report_of(tmp_path / "s")
    assert report["settings"]["batch_texts"] == 24
    assert "cls.predictions" not in str(_weights(tmp_path / "s").keys())
    assert report["result"]["parameters"] == sum(
        w.numel() for f in (tmp_path / "s", tmp_path / "s/2_Dense") for w in _weights(f).values()
    )
    card = (tmp_path / "s" / "README.md").read_text()
    says(card, "pipeline_tag: sentence-similarity", 'SentenceTransformer("this folder")')
    assert "| batch_texts |" in card
    unread = ("mask_prob", "align", "pool", "temperature", "targets", "outputs", "combine")
    assert not [name for name in unread if f"| {name} |" in card]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_with_states_and_masked_tokens(stores: Callable[..., Path], tmp_path: Path) -> None:
    """With a loss of the vocabulary the masked-LM head is saved."""
    from transformers import AutoModelForMaskedLM

    store = stores(hidden="layer:4")
    words = ("--store", store, "--out", tmp_path / "s", *VOCAB, "--steps", "4")
    loss = "embedding=1,similarity-kl=1,in-batch=0.1,hidden=1,mlm=1"
    printed = ok(student_train, *words, "--batch-texts", "16", "--loss", loss)
    says(printed, "valid_mlm", "valid_embedding")
    assert encoded(tmp_path / "s", ["A text."]).shape == (1, 32)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "s").num_parameters() > 0
    # A student with the teacher's hidden size needs no projection.
    assert not (tmp_path / "s" / "2_Dense").exists()
    assert (tmp_path / "s" / "1_Pooling" / "config.json").exists()


def test_defaults_follow_the_store_and_the_student(stores: Callable[..., Path]) -> None:
    both, vectors = (str(stores(**more)) for more in ({"hidden": "layer:4"}, {}))

    def default(*paths: str, **more: str) -> set[str]:
        return set(checked_from({"store": paths, **more}).loss)

    assert default(both) == {"embedding", "similarity", "hidden"}
    for words in ((vectors,), (both, vectors), (vectors, both)):
        assert default(*words) == {"embedding", "similarity"}
    assert default(both, student="static:8") == {"embedding", "similarity"}
    for student, vocab in (("static:8", "20k"), ("32x1x4", "5k")):
        assert checked_from({"store": (both,), "student": student}).vocab == vocab
        assert StudentBatches(both, student=student).options.vocab == vocab
        assert checked_from({"store": (both,), "student": student, "vocab": "9k"}).vocab == "9k"


def test_python_has_the_defaults_of_the_command(
    stores: Callable[..., Path], tmp_path: Path
) -> None:
    both, vectors = (str(stores(**more)) for more in ({"hidden": "layer:4"}, {}))
    for path, words in (
        (both, {}),
        (vectors, {"student": "static:8"}),
        (both, {"student": "teacher:2"}),
        (both, {"batch_tokens": 512, "loss": "embedding=1"}),
        (both, {"student": "teacher:2", "loss": "mlm=1,hidden=30", "lr_end": 1e-5}),
        (both, {"init": "mixed-vocab"}),
    ):
        command = checked_from({"store": (path,), **words})
        given = TrainOptions(path, **words)
        with open_store(path) as store:
            python = with_store_defaults(given, [store])
            other = with_store_defaults(dataclasses.replace(given, seed=3), [store])
        assert python.describing() == command.describing()
        loss = dataclasses.replace(given, loss={"mlm": 1.0, "hidden": 30.0}).given
        assert other.describing() == {**command.describing(), "seed": 3} and "loss" in loss
    with pytest.raises(UserError, match="hidden"):  # a default that is given is not replaced
        run(TrainOptions(vectors, loss="mlm=1,hidden=30"))
    small: dict[str, Any] = {"vocab": "300", "student": "8x1x1", "steps": 1, "held_out": 0.2}
    report = run(TrainOptions(both, out=tmp_path / "student", **small))
    assert report["settings"]["loss"] == {"embedding": 1, "similarity": 10, "hidden": 3}
    assert report["settings"]["batch_texts"] == 128


def test_a_sweep_compares_students_of_different_losses_by_rank_correlation(
    stores: Callable[..., Path], tmp_path: Path
) -> None:
    """A static student has no states, so its default loss differs, and so does its rate."""
    store, out = stores(hidden="layer:4"), tmp_path / "sweep"
    words = ("--store", store, "--vocab", "450", "--steps", "2", "--device", "cpu", "--out", out)
    said = ok(
        student_sweep, *words, "--student", "static:8", "--student", "32x1x4", "--held-out", "0.5"
    )
    runs = json.loads((out / "runs.json").read_text())
    assert runs["varied"] == ["student", "loss", "lr"]
    losses = [run["settings"]["loss"] for run in runs["runs"]]
    assert losses == ["embedding=1,similarity=10", "embedding=1,similarity=10,hidden=3"]
    assert "| valid_loss" not in said and "| valid_spearman |" in said
    reports = [json.loads(path.read_text()) for path in out.glob("*/training.json")]
    best = max(report["result"]["valid_spearman"] for report in reports)
    says(said, f": valid_spearman {best:.5g} (rank correlation with the teacher's")


def test_cosines_alone_need_no_space_of_the_teachers(
    stores: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a projection the vectors have the student's hidden size."""
    store = stores()
    for name, student in (("a", "24x1x2"), ("b", "modernbert:24x1x2")):
        words = ("--store", store, "--out", tmp_path / name, "--vocab", "450", "--device", "cpu")
        printed = ok(
            student_train, *words, "--student", student, "--steps", "3", "--batch-texts", "16",
            "--loss", "similarity=1", "--max-length", "12",
        )  # fmt: skip
        says(
            printed, "sequences have 12 tokens of the student or more: what is beyond --max-length"
        )
        assert encoded(tmp_path / name, ["A text.", "Two."]).shape == (2, 24)


def test_vectors_of_word_pieces(stores: Callable[..., Path], tmp_path: Path) -> None:
    """A static student is a StaticEmbedding of sentence-transformers, and learns."""
    from transformers import AutoModel

    store = stores()
    words = ("--store", store, "--out", tmp_path / "s", "--vocab", "450", "--device", "cpu")
    ok(student_train, *words, "--student", "static:24", "--steps", "150", "--batch-texts", "24")
    listed = json.loads((tmp_path / "s" / "modules.json").read_text())
    kinds = [module["type"].rpartition(".")[2] for module in listed]
    assert kinds == ["StaticEmbedding", "Dense", "Normalize"]
    fs = open_store(store)
    vectors = encoded(tmp_path / "s", list(fs.texts()))
    assert (vectors * fs.embeddings()).sum(axis=1).mean() > 0.9
    pieces = AutoModel.from_pretrained(tmp_path / "s").embedding.weight
    assert torch.equal(pieces, _weights(tmp_path / "s")["embedding.weight"])
    modes = {path.stat().st_mode for path in (tmp_path / "s").rglob("*") if path.is_file()}
    assert len(modes) == 1, "safetensors writes weights for their owner alone"
    line = refused(student_train, *words[:2], *words[4:], "--student", "static:24",
                   "--out", tmp_path / "t", "--loss", "mlm=1,embedding=1")  # fmt: skip
    says(line, "--loss mlm: --student static:24 has no layers and no heads")
    line = refused(student_train, *words[:2], *words[4:], "--student", "static:0")
    says(line, "expected the size of its vectors, at least 1, such as static:256")


@pytest.mark.slow
def test_the_first_numbers_of_a_vector_are_one(stores: Callable[..., Path], tmp_path: Path) -> None:
    store, fs = stores(), open_store(stores())
    common: Words = (
        "--store", store, "--vocab", "450", "--device", "cpu", "--student", "static:24",
        "--steps", "150", "--batch-texts", "24", "--loss", "similarity=10",
    )  # fmt: skip
    ok(student_train, *common, "--out", tmp_path / "plain")
    ok(student_train, *common, "--out", tmp_path / "nested", "--matryoshka", "8,4")
    assert report_of(tmp_path / "nested")["settings"]["matryoshka"] == [8, 4]
    assert report_of(tmp_path / "plain")["settings"]["matryoshka"] == []
    texts, wanted = list(fs.texts()), angles(fs.embeddings())
    plain, nested = (
        np.corrcoef(angles(encoded(tmp_path / name, texts)[:, :4]), wanted)[0, 1]
        for name in ("plain", "nested")
    )
    assert nested > plain + 0.05
    line = refused(student_train, *common, "--out", tmp_path / "s", "--matryoshka", "24")
    says(line, "--matryoshka 24: the student's vectors have size 24; give smaller sizes")
    # The folder has nothing but the settings of the refused training, so the next one uses it.
    ok(student_train, *common, "--steps", 1, "--out", tmp_path / "s", "--matryoshka", "8")
    assert report_of(tmp_path / "s")["settings"]["matryoshka"] == [8]
    line = refused(student_train, *common[:-1], "embedding=1", "--matryoshka", "8",
                   "--out", tmp_path / "s")  # fmt: skip
    says(line, "--matryoshka 8: no loss compares parts of a vector; add similarity")
    line = refused(student_train, *common, "--matryoshka", "8,x", "--out", tmp_path / "s")
    says(line, "--matryoshka 8,x: expected sizes of vectors, separated by commas, such as 256")


def test_it_is_the_same_after_a_stop(stores: Callable[..., Path], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"vocab": "450", "student": "24x1x2", "loss": {"embedding": 1.0}}
    changes |= {"steps": 6, "batch_texts": 16, "checkpoint_every": 2}
    with open_store(stores()) as store:
        student, collator, options = prepared(store, **changes)
        whole = train(store, student, collator, options)
        stop(store, options, tmp_path, 4)
        _, again, _ = resume(store, options, tmp_path)
    same_weights(whole.student, again.student)
    same_weights(whole.vector_head, again.vector_head)


def test_two_stores_of_one_teacher_share_a_projection(
    stores: Callable[..., Path], tmp_path: Path
) -> None:
    both = ("--store", stores("query"), "--store", stores("document"))
    words = ("--vocab", "450", "--student", "24x1x2", "--device", "cpu", "--steps", "3")
    ok(student_train, *both, *words, "--batch-texts", "8", "--out", tmp_path / "s")
    settings = json.loads((tmp_path / "s" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == PROMPTS and settings["default_prompt_name"] is None
    assert encoded(tmp_path / "s", ["A text."], prompt_name="query").shape == (1, 32)


def test_a_sweep_ranks_by_the_mean_of_all_stores(
    stores: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = itertools.cycle([0.2, 0.6])  # of the first store, and of the second
    monkeypatch.setattr(_VectorPairs, "figures", lambda pairs: {"valid_spearman": next(values)})
    both = ("--store", stores("query"), "--store", stores("document"), "--held-out", "0.2")
    words = ("--vocab", "450", "--student", "24x1x2", "--device", "cpu", "--steps", "1")
    ok(student_train, *both, *words, "--batch-texts", "8", "--out", tmp_path / "s")
    result = report_of(tmp_path / "s")["result"]
    assert result["valid_spearman"] == pytest.approx(0.4)
    assert result["store2_valid_spearman"] == 0.6


def test_a_name_of_two_prompts_is_not_inherited(
    stores: Callable[..., Path], tiny_teacher: Teachers, tmp_path: Path
) -> None:
    prompts = {**PROMPTS, "query": "ask: "}
    other = mean_embedder(tiny_teacher("bert"), tmp_path / "m", prompts=prompts)
    corpus = write_corpus(tmp_path / "corpus.txt", 20, ENGLISH)
    asked = {"head": "embedding", "logits": None, "prompt": "query"}
    path = dumped(other, corpus, tmp_path / "other.zarr", **asked)
    with open_store(stores("query")) as one, open_store(path) as two:
        found = inherited_settings([one, two])
    rest = {name: prompt for name, prompt in PROMPTS.items() if name != "query"}
    assert rest and found["prompts"] == rest and "default_prompt" not in found


def test_refused_students(stores: Callable[..., Path], tiny_store: Stores, tmp_path: Path) -> None:
    words = ("--out", tmp_path / "s", *VOCAB, "--loss", "embedding=1")
    line = refused(student_train, "--store", tiny_store("bert"), *words)
    says(line, "--loss embedding: ", "has no text vectors; dump them (--head embedding)")
    line = refused(
        student_train, "--store", stores(), "--store", stores("query"), *words,
        "--combine", "outputs",
    )  # fmt: skip
    says(line, "--combine outputs: --loss embedding compares with the vectors of one teacher")
    with pytest.raises(UserError, match="did you mean embedding. expected one of .* in-batch"):
        TrainOptions(store="a.zarr", loss={"embeddings": 1.0})


def test_a_student_compares_texts_as_its_teacher_does(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Losses of vectors ignore lengths, and a dot product does not."""
    corpus = write_corpus(tmp_path / "corpus.txt", 24, ENGLISH)
    base, stores = tiny_teacher("bert"), {}
    for name, ends in (("dot", []), ("euclidean", [normalize()]), ("manhattan", [])):
        behind, settings = (pooling("mean"), *ends), {"similarity_fn_name": name}
        folder = modules(*behind, base=base, folder=tmp_path / name, **settings)
        asked: dict[str, Any] = {"head": "embedding", "logits": None}
        stores[name] = dumped(folder, corpus, tmp_path / f"{name}.zarr", **asked)
    for name in ("dot", "euclidean"):
        out = tmp_path / f"student-{name}"
        printed = ok(student_train, "--store", stores[name], "--out", out, *VOCAB, "--steps", "1")
        assert ("ranked by directions alone" in printed) == (name == "dot")
        settings = json.loads((out / "config_sentence_transformers.json").read_text())
        assert settings["similarity_fn_name"] == name
    line = refused(student_train, "--store", stores["manhattan"], "--out", tmp_path / "r", *VOCAB)
    assert "manhattan.zarr: its teacher compares texts by manhattan distance" in line


SMALL = ("--vocab", "450", "--device", "cpu", "--steps", "3", "--batch-texts", "8")


@pytest.fixture(scope="module")
def store(embedder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    corpus = write_corpus(folder / "corpus.txt", 60, ENGLISH)
    return dumped(embedder, corpus, folder / "s.zarr", head="embedding", logits=None)


def test_students_without_layers_put_candidates_in_order(
    store: Path, embedder: Path, tmp_path: Path
) -> None:
    small, student = collection(tmp_path / "small"), tmp_path / "student"
    ok(student_train, "--store", store, "--out", student, *SMALL, "--student", "static:8")
    printed = ok(
        downstream, "--task", "rerank", "--model", student, "--candidates-by", embedder,
        "--depth", "4", "--test", small, "--out", tmp_path / "out",
    )  # fmt: skip
    says(printed, "in their own order: nDCG@10", "recall@4")


@pytest.mark.parametrize("loss", ["similarity=1", "embedding=1", "in-batch=1"])
def test_a_student_of_another_space_searches_no_index_of_the_teachers(
    store: Path, embedder: Path, tmp_path: Path, loss: str
) -> None:
    small, student = collection(tmp_path / "small"), tmp_path / "student"
    words = ("--store", store, "--out", student, *SMALL, "--loss", loss)
    ok(student_train, *words, "--student", "static:32")  # the teacher's hidden size
    search = (
        "--task", "retrieval", "--model", student, "--documents-by", embedder, "--test", small,
        "--out", tmp_path / "out",
    )  # fmt: skip
    if loss != "similarity=1":
        ok(downstream, *search)
        return
    line = refused(downstream, *search)
    says(line, "was trained with similarity, none of which compares its vectors with the teacher's")
    says(line, "train it with --loss embedding=1 as well")


@pytest.mark.apart
def test_the_card_of_a_bilstm_says_how_it_loads(store: Path, tmp_path: Path) -> None:
    student = tmp_path / "this folder"
    ok(student_train, "--store", store, "--out", student, *SMALL, "--student", "bilstm:8,8")
    code = (student / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert code.startswith("import teachonce.checkpoints.bilstm\n")
    assert "tensor([[1." in printed_by(sys.executable, "-c", code, cwd=tmp_path)


def test_one_text_has_no_other_to_be_compared_with(store: Path, tmp_path: Path) -> None:
    words = ("--store", store, "--out", tmp_path / "s", *SMALL[:-1], "1", "--student", "static:8")
    line = refused(student_train, *words)
    says(line, "--batch-texts 1: --loss similarity compares the texts of a batch")
    ok(student_train, *words, "--loss", "embedding=1")
