"""Labels of other kinds: several at once, numbers, and a label for a word's later pieces.

- Classifiers with other problem types than a single label: several labels at once, and numbers.
- A tagger with a label for a word's pieces after its first: teacher, store, students, scores.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from teachonce.downstream.cli import main as downstream
from teachonce.downstream.cli import main as score
from teachonce.feature_store.cli import main as feature_store
from teachonce.feature_store.cli import main as info
from teachonce.store import FeatureStore, TaskSpec, open_store
from teachonce.student_export.loaded_student import load_student
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.cli import main as train
from teachonce.student_train.losses.task import NO_LABEL
from teachonce.teacher_dump.cli import main as teacher_dump
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import features_of, make_store
from tests.making.texts import ENGLISH, RUSSIAN
from tests.student_train.support import prepared
from tests.teacher_dump.windows.test_label_numbers import MOODS

SEVERAL, NUMBERS = "multi_label_classification", "regression"
TRAINED: Words = (
    "--student", "16x2x2", "--vocab", "400", "--lr", "3e-3", "--batch-tokens", "512",
    "--device", "cpu", "--precision", "fp32",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("texts") / "c.txt", 60)


@pytest.fixture(scope="module")
def teacher(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers
) -> Callable[..., Path]:
    """Return a function `teacher(...)` -> folder of a classifier with these fields in its
    config.json."""
    root = tmp_path_factory.mktemp("teachers")

    def made(kind: str = "classification", labels: Any = MOODS, **fields: Any) -> Path:
        folder = root / f"{len(list(root.iterdir()))}"
        shutil.copytree(tiny_teacher("bert", kind, labels), folder)
        return changed(folder, "config.json", **fields)

    return made


def dump(model: Path, corpus: Path, out: Path, *more: str) -> Words:
    return ("--model", model, "--corpus", corpus, "--out", out, "--device", "cpu", *more)


@pytest.fixture(scope="module")
def several(
    teacher: Callable[..., Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Save a teacher of several labels at once, whose outputs differ by text, and make its
    store."""
    model, folder = teacher(problem_type=SEVERAL), tmp_path_factory.mktemp("several")
    logits = torch.stack(answers(model, corpus.read_text("utf-8").splitlines()[:40]))
    network = AutoModelForSequenceClassification.from_pretrained(model)
    scale, bias = 0.3 / logits.std(dim=0), network.classifier.bias.data
    network.classifier.weight.data *= scale[:, None]
    network.classifier.bias.data = (bias - logits.mean(dim=0)) * scale + torch.tensor([2, 0.5, -2])
    network.save_pretrained(model)
    printed = ok(teacher_dump, *dump(model, corpus, folder / "a.zarr", "--hidden", "none"))
    says(printed, f"features  logits of 3 outputs ({SEVERAL})")
    return model, folder / "a.zarr"


def answers(folder: Path, texts: list[str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [
            network(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
            for text in texts
        ]


@pytest.mark.slow
def test_several_labels_are_learnt_as_sigmoids(
    several: tuple[Path, Path], corpus: Path, tmp_path: Path
) -> None:
    model, store = several
    fs, out = open_store(store), tmp_path / "s"
    assert fs.task == TaskSpec("classification", MOODS, problem_type=SEVERAL)
    printed = ok(student_train, "--store", store, *TRAINED, "--steps", "60", "--out", out)
    says(printed, "1 kl", "valid_agreement")
    texts = corpus.read_text("utf-8").splitlines()[:40]
    own, wanted = (torch.stack(answers(each, texts)).sigmoid() for each in (out, model))
    assert (wanted.sum(dim=1) > 1.3).all()  # no softmax
    assert (own - wanted).abs().mean() < 0.1
    # transformers' own pipeline and loss recognise the student's problem type
    assert json.loads((out / "config.json").read_text())["problem_type"] == SEVERAL
    said = {each["label"]: each["score"] for each in pipeline(
        "text-classification", str(out), device="cpu"
    )(texts[0], top_k=None)}  # fmt: skip
    assert [said[name] for name in MOODS] == pytest.approx(own[0].tolist(), abs=1e-5)
    card = (out / "README.md").read_text()
    says(card, "any number of labels", 'predict("A text.", top_k=None)', "in nats per label")
    exported = load_student(out)
    assert exported.task is not None and exported.task.problem_type == SEVERAL
    ok(feature_store, "verify", store, "--model", model, "--device", "cpu")
    says(ok(feature_store, "info", store), "any of 3 labels: ")
    shown = json.loads(ok(feature_store, "show", store, "0", "--json"))
    chances = 1 / (1 + np.exp(-fs[0].views[0].class_logits))
    found = {each["label"]: each["probability"] for each in shown["says"]}
    assert [found[name] for name in MOODS] == pytest.approx(chances.tolist(), abs=1e-6)


def test_what_cannot_be_honoured_is_refused(
    several: tuple[Path, Path], teacher: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    model, store = several
    table = tmp_path / "t.tsv"
    table.write_text("text\tlabel\nA text.\tpositive\nAnother.\tneutral\n")
    words = dump(model, table, tmp_path / "a.zarr", "--label-column", "label")
    says(refused(teacher_dump, *words), "--label-column label: the teacher", "several labels at")
    tagger = teacher("tagging", problem_type=SEVERAL)
    line = refused(teacher_dump, *dump(tagger, corpus, tmp_path / "a.zarr"))
    says(line, f"problem_type in its config.json is {SEVERAL}", "a tagger", "remove problem_type")
    misspelt = teacher(problem_type="multi_label")
    line = refused(teacher_dump, *dump(misspelt, corpus, tmp_path / "a.zarr"))
    says(line, "problem_type in its config.json is 'multi_label', expected single_label_class")
    out: Words = ("--out", tmp_path / "s")
    line = refused(student_train, "--store", store, *TRAINED, "--loss", "ce=1", *out)
    says(line, "--loss ce: the teacher of", "several labels at once")
    says(line, "use kl, logit, hard, log-odds")
    plain = tmp_path / "plain.zarr"
    ok(teacher_dump, *dump(teacher(), corpus, plain, "--hidden", "none"))
    line = refused(student_train, "--store", store, "--store", plain, *TRAINED, *out)
    says(line, "has problem_type single_label_classification, the teacher of", f" {SEVERAL}")
    scored: Words = ("--task", "classify", "--model", model, "--as-is", "--test", table)
    line = refused(downstream, *scored, *out)
    says(line, f"predicts several labels for each text (problem_type {SEVERAL}")
    says(line, "scores one label;")


def test_numbers_stay_numbers(teacher: Callable[..., Path], corpus: Path, tmp_path: Path) -> None:
    for name, model in (
        ("three", teacher(problem_type=NUMBERS)),
        ("one", teacher(labels=("score",), problem_type=NUMBERS)),
    ):
        store, out = tmp_path / f"{name}.zarr", tmp_path / name
        ok(teacher_dump, *dump(model, corpus, store, "--hidden", "none"))
        logit = float(open_store(store)[0].views[0].class_logits[0])
        says(ok(feature_store, "show", store, "0"), f"{logit:.3f}"[:-1])
        line = refused(student_train, "--store", store, *TRAINED, "--loss", "kl=1", "--out", out)
        says(line, "--loss kl: the teacher of", "use logit, margin or losses of hidden states")
        printed = ok(student_train, "--store", store, *TRAINED, "--steps", "2", "--out", out)
        says(printed, "1 logit + 1 margin")
        assert json.loads((out / "config.json").read_text())["problem_type"] == NUMBERS
        text = corpus.read_text("utf-8").splitlines()[0]
        said = pipeline("text-classification", str(out), device="cpu")(text, top_k=None)
        want = sorted(answers(out, [text])[0].tolist(), reverse=True)  # no sigmoid, no softmax
        assert [each["score"] for each in said] == pytest.approx(want, abs=1e-5)


def test_the_activation_of_a_cross_encoder_shows_several_labels(
    teacher: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    """sentence-transformers ignores `problem_type`, and writes the activation instead."""
    about = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    model = teacher(sentence_transformers=about)
    ok(teacher_dump, *dump(model, corpus, tmp_path / "a.zarr", "--hidden", "none"))
    fs = open_store(tmp_path / "a.zarr")
    assert fs.task and fs.task.output_kind == "several labels"
    words: Words = (*TRAINED, "--steps", "1", "--out", tmp_path / "s")
    ok(student_train, "--store", tmp_path / "a.zarr", *words)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["sentence_transformers"]["activation_fn"] == about["activation_fn"]
    assert config["problem_type"] == SEVERAL


def test_stores_of_before_have_the_problem_type_in_the_config(tmp_path: Path) -> None:
    files = {"config.json": json.dumps({"problem_type": SEVERAL}).encode()}
    make_store(tmp_path / "a.zarr", features_of(tier="classification"), files=files)
    fs: FeatureStore = open_store(tmp_path / "a.zarr")
    assert fs.features.task and fs.features.task.problem_type is None
    assert fs.task and fs.task.output_kind == "several labels"


AS_IS = ("--task", "ner", "--as-is")
LABELS = ("B-NAME", "O")
SMALL = ("--vocab", "300", "--batch-tokens", "512", "--device", "cpu")
Stores = dict[str, FeatureStore]


@pytest.fixture(scope="module")
def capitalised(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def stores(capitalised: Path, tiny_teacher: Teachers) -> Stores:
    """Dump an untrained teacher with tags of first pieces only, and a teacher trained on all
    pieces."""
    out = capitalised.parent / "all"
    ok(
        *(score, "--task", "ner", "--model", tiny_teacher("bert"), "--pieces", "all", "--save"),
        *("--train", capitalised, "--dev", capitalised, "--out", out, "--seeds", 1, "--epochs", 3),
        *("--batch-size", 4, "--lr", "4e-3"),
    )
    options = {"head": "tagging", "logits": None, "hidden": "layer:4", "attention": "none"}
    teachers = {"first": tiny_teacher("bert", "tagging", LABELS), "all": out / "model"}
    return {
        pieces: open_store(
            dumped(model, capitalised, capitalised.parent / f"{pieces}.zarr", **options)
        )
        for pieces, model in teachers.items()
    }


def test_the_teacher_and_its_store_know_the_label(stores: Stores, capitalised: Path) -> None:
    tuned = capitalised.parent / "all"
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
    stores: Stores,
    capitalised: Path,
    tmp_path: Path,
    student: str,
    pieces: str,
    words: tuple[str, ...],
) -> None:
    out, scores = tmp_path / "student", tmp_path / "scores"
    options = (*SMALL, "--student", student, "--steps", 5, "--lr", "1e-2")
    ok(train, "--store", stores[pieces].path, "--out", out, *options, *words)
    later = getattr(AutoConfig.from_pretrained(out), "later_label", None)
    assert later == ("X" if pieces == "all" else None)
    ok(score, *AS_IS, "--model", out, "--test", capitalised, "--out", scores)
    found = json.loads((scores / "scores.json").read_text())
    assert found["settings"]["pieces"] == pieces and found["mean"]["test"]["accuracy"] > 0.5


def test_the_label_is_never_a_words_tag(stores: Stores, capitalised: Path, tmp_path: Path) -> None:
    """It is scored as O, as there is no tag to continue."""
    folder = capitalised.parent / "all/model"
    model = AutoModelForTokenClassification.from_pretrained(folder)
    model.classifier.bias.data[2] += 1e4
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "m")
    ok(score, *AS_IS, "--model", tmp_path / "m", "--test", capitalised, "--out", tmp_path / "s")
    found = json.loads((tmp_path / "s/scores.json").read_text())["mean"]["test"]
    outside = [line.endswith("O") for line in capitalised.read_text("utf-8").splitlines() if line]
    assert found["accuracy"] == pytest.approx(np.mean(outside)) and found["entity_f1"] == 0


def test_a_label_that_the_model_lacks_is_reported(
    stores: Stores, capitalised: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(capitalised.parent / "all/model", tmp_path / "m"))
    changed(model, "config.json", later_label="Y")
    words = ("--model", tmp_path / "m", "--test", capitalised, "--out", tmp_path / "s")
    says(refused(score, *AS_IS, *words), "later_label", "'Y'", "B-NAME, O, X")
    changed(model, "config.json", later_label=None)
    options = {"head": "tagging", "logits": None, "hidden": "none", "attention": "none"}
    plain = dumped(tmp_path / "m", capitalised, tmp_path / "plain.zarr", **options, limit=100)
    both = ("--store", stores["all"].path, "--store", plain, "--out", tmp_path / "o")
    says(refused(train, *both, *SMALL), str(plain), "no label for a word's later pieces", "X;")
