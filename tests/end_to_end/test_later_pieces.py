"""A tagger with a label for a word's pieces after its first: teacher, store, students, scores."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from teachonce.downstream.cli import main as score
from teachonce.feature_store.cli import main as info
from teachonce.store import FeatureStore, TaskSpec, open_store
from teachonce.student_train.cli import main as train
from teachonce.student_train.losses.task import NO_LABEL
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.texts import ENGLISH, RUSSIAN
from tests.student_train.support import prepared

AS_IS = ("--task", "ner", "--as-is")
LABELS = ("B-NAME", "O")
SMALL = ("--vocab", "300", "--batch-tokens", "512", "--device", "cpu")
Stores = dict[str, FeatureStore]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make tagged words, in which capitalised words are names. Without punctuation, later pieces
    are the pieces with ##."""
    lines = []
    for text in ENGLISH + RUSSIAN:
        lines += [
            f"{word}\t{LABELS[not word[0].isupper()]}" for word in re.findall(r"\w+", text)
        ] + [""]
    path = tmp_path_factory.mktemp("names") / "names.tsv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def stores(corpus: Path, tiny_teacher: Teachers) -> Stores:
    """Dump an untrained teacher with tags of first pieces only, and a teacher trained on all
    pieces."""
    out = corpus.parent / "all"
    ok(
        *(score, "--task", "ner", "--model", tiny_teacher("bert"), "--pieces", "all", "--save"),
        *("--train", corpus, "--dev", corpus, "--out", out, "--seeds", 1, "--epochs", 3),
        *("--batch-size", 4, "--lr", "4e-3"),
    )
    options = {"head": "tagging", "logits": None, "hidden": "layer:4", "attention": "none"}
    teachers = {"first": tiny_teacher("bert", "tagging", LABELS), "all": out / "model"}
    return {
        pieces: open_store(dumped(model, corpus, corpus.parent / f"{pieces}.zarr", **options))
        for pieces, model in teachers.items()
    }


def test_the_teacher_and_its_store_know_the_label(stores: Stores, corpus: Path) -> None:
    tuned = corpus.parent / "all"
    assert json.loads((tuned / "scores.json").read_text())["settings"]["pieces"] == "all"
    config = AutoConfig.from_pretrained(tuned / "model")
    assert config.later_label == "X" and tuple(config.id2label.values()) == (*LABELS, "X")
    assert stores["first"].features.task == TaskSpec("tagging", LABELS)
    assert stores["all"].features.task == TaskSpec("tagging", (*LABELS, "X"), "X")
    assert "3 labels: B-NAME, O, X; X labels later pieces" in ok(info, "info", stores["all"].path)
    said = gold = 0
    for plain, record in zip(stores["first"], stores["all"], strict=True):
        assert plain.tags is not None and record.tags is not None
        others = plain.tags == NO_LABEL
        assert (record.tags[~others] == plain.tags[~others]).all()
        later = others & ~record.special
        assert (record.tags[later] == 2).all() and (record.tags[record.special] == NO_LABEL).all()
        gold += later.sum()
        said += (record.views[0].tag_logits.argmax(1) == 2)[later].sum()
    assert said > 0.9 * gold > 50


@pytest.mark.parametrize("align", ["span", "reduce", "match"])
def test_every_piece_of_a_word_has_a_target(stores: Stores, align: str) -> None:
    tokens = {}
    for pieces, store in stores.items():
        _, collator, _ = prepared(store, vocab="300", loss={"ce": 1.0, "kl": 1.0}, align=align)
        found = []
        for number, raw in enumerate(store.stream(0, 0, 512, features=collator.features())):
            batch = collator(raw, 0, (0, 0, number))
            read, task = batch.distillation.inputs or batch.inputs, batch.distillation.task
            ids = read.ids[read.present][task.tokens].tolist()
            names = collator.student_tokenizer.convert_ids_to_tokens(ids)
            assert len(names) == len(task.gold) == len(task.logits)
            for name, gold in zip(names, task.gold.tolist(), strict=True):
                assert gold == 2 if name.startswith("##") else gold in (0, 1)
            found += names
        tokens[pieces] = found
    words = [name for name in tokens["all"] if not name.startswith("##")]
    assert sorted(words) == sorted(tokens["first"]) and len(tokens["all"]) > 1.1 * len(words)


@pytest.mark.parametrize(
    ("student", "pieces", "words"),
    [
        ("16x2x2", "all", ("--loss", "ce=1,logit=1")),
        ("modernbert:16x2x2", "all", ("--loss", "ce=1,logit=1")),
        ("bilstm:12,10", "all", ("--recipe", "tinymbert-d3-1", "--data", "all")),
        ("bilstm:12,10", "first", ("--recipe", "tinymbert-d1", "--data", "all")),
    ],
)
def test_students_keep_the_label(
    stores: Stores, corpus: Path, tmp_path: Path, student: str, pieces: str, words: tuple[str, ...]
) -> None:
    out, scores = tmp_path / "student", tmp_path / "scores"
    options = (*SMALL, "--student", student, "--steps", 5, "--lr", "1e-2")
    ok(train, "--store", stores[pieces].path, "--out", out, *options, *words)
    later = getattr(AutoConfig.from_pretrained(out), "later_label", None)
    assert later == ("X" if pieces == "all" else None)
    ok(score, *AS_IS, "--model", out, "--test", corpus, "--out", scores)
    found = json.loads((scores / "scores.json").read_text())
    assert found["settings"]["pieces"] == pieces and found["mean"]["test"]["accuracy"] > 0.5


def test_the_label_is_never_a_words_tag(stores: Stores, corpus: Path, tmp_path: Path) -> None:
    """It is scored as O, as there is no tag to continue."""
    folder = corpus.parent / "all/model"
    model = AutoModelForTokenClassification.from_pretrained(folder)
    model.classifier.bias.data[2] += 1e4
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "m")
    ok(score, *AS_IS, "--model", tmp_path / "m", "--test", corpus, "--out", tmp_path / "s")
    found = json.loads((tmp_path / "s/scores.json").read_text())["mean"]["test"]
    outside = [line.endswith("O") for line in corpus.read_text("utf-8").splitlines() if line]
    assert found["accuracy"] == pytest.approx(np.mean(outside)) and found["entity_f1"] == 0


def test_a_label_that_the_model_lacks_is_reported(
    stores: Stores, corpus: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(corpus.parent / "all/model", tmp_path / "m"))
    changed(model, "config.json", later_label="Y")
    words = ("--model", tmp_path / "m", "--test", corpus, "--out", tmp_path / "s")
    says(refused(score, *AS_IS, *words), "later_label", "'Y'", "B-NAME, O, X")
    changed(model, "config.json", later_label=None)
    options = {"head": "tagging", "logits": None, "hidden": "none", "attention": "none"}
    plain = dumped(tmp_path / "m", corpus, tmp_path / "plain.zarr", **options, limit=100)
    both = ("--store", stores["all"].path, "--store", plain, "--out", tmp_path / "o")
    says(refused(train, *both, *SMALL), str(plain), "no label for a word's later pieces", "X;")
