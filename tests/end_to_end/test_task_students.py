"""Students of classification and tagging teachers: every loss and every kind, from store to
folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import matthews_corrcoef
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from teachonce.store import FeatureStore, open_store
from teachonce.student_train.cli import main
from teachonce.student_train.data.blocks import has_gold, split_blocks
from teachonce.student_train.data.task_targets import word_begins
from teachonce.student_train.sweep import main as sweep
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import warning_of_one_label
from teachonce.training.words import word_spans
from tests.end_to_end.support import Words, ok, refused, report_of, says
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import ENGLISH, RUSSIAN
from tests.student_train.support import first_batch, prepared, validated
from tests.teacher_dump.windows.test_label_numbers import MOODS, TAGS

OF_ANY_TASK = ("kl", "logit", "log-odds", "log-odds-half", "hard", "hidden", "hidden-gelu",
               "hidden-kld", "cosine", "contrastive")  # fmt: skip
KINDS = ("bert:16x2x2", "16x2x2", "bilstm:12,10")
SMALL = ("--vocab", "400", "--batch-tokens", "512", "--device", "cpu")


def test_targets_of_classes_match_the_store(classes: FeatureStore) -> None:
    losses = {"ce": 1.0, "kl": 1.0, "sentence": 1.0}
    _, collator, _ = prepared(classes, loss=losses)
    seen = 0
    for number, raw in enumerate(classes.stream(0, 0, 512, features=collator.features())):
        wanted = collator(raw, 0, (0, 0, number)).to(torch.device("cpu")).distillation
        assert wanted.task.tokens is None
        for row, index in enumerate(raw.index.tolist()):
            record = classes[index]
            view = record.views[0]
            assert int(wanted.task.gold[row]) == (-1 if record.label is None else record.label)
            np.testing.assert_array_equal(wanted.task.logits[row], view.class_logits)
            mean, deviation = classes.calibration["layer4"]
            normal = (view.hidden["layer4"][0] - mean) / deviation
            np.testing.assert_allclose(wanted.decoded["sentence"]["layer4"][row], normal, atol=1e-4)
            seen += 1
    assert seen == len(classes)


@pytest.mark.parametrize("align", ["span", "reduce"])
def test_targets_of_tags_belong_to_the_words_first_pieces(tags: FeatureStore, align: str) -> None:
    _, collator, _ = prepared(tags, loss={"ce": 1.0, "kl": 1.0}, align=align)
    words = gold = 0
    for number, raw in enumerate(tags.stream(0, 0, 512, features=collator.features())):
        batch = collator(raw, 0, (0, 0, number))
        wanted = batch.distillation
        read = batch.inputs if wanted.inputs is None else wanted.inputs
        ids = read.ids[read.present]
        pieces = collator.student_tokenizer.convert_ids_to_tokens(ids[wanted.task.tokens].tolist())
        assert not any(piece.startswith("##") for piece in pieces)
        words += len(pieces)
        gold += int((wanted.task.gold >= 0).sum())
        assert len(wanted.task.gold) == len(wanted.task.logits) == len(pieces)
    # Words of texts with tags are the words of the file.
    tagged = [bool((np.asarray(record.tags) >= 0).any()) for record in tags]
    texts = zip(tags.texts(), tagged, strict=True)
    assert words == sum(len(text.split() if own else word_spans(text)) for text, own in texts)
    stored = sum(int((np.asarray(record.tags) >= 0).sum()) for record in tags)
    assert gold == stored < words


# Unigram without tags is left out: one of its pieces may contain two marks, which are two words.
@pytest.mark.parametrize(
    ("kind", "tagged"),
    [("wordpiece", True), ("bpe", True), ("unigram", True), ("wordpiece", False), ("bpe", False)],
)
def test_words_begin_after_a_blank_however_offsets_count_it(
    kind: str, tagged: bool, make_tokenizer: Tokenizers
) -> None:
    texts = ["  Two blanks,\tthen a tab\u3000and a wide one ", *ENGLISH[:3], *RUSSIAN[:3]]
    tokenizer = make_tokenizer(kind)
    encodings = [tokenizer(text, return_offsets_mapping=True) for text in texts]
    start = np.cumsum([0, *(len(each["input_ids"]) for each in encodings)])
    offsets = np.concatenate([each["offset_mapping"] for each in encodings])
    special = np.concatenate(
        [tokenizer.get_special_tokens_mask(e["input_ids"], None, True) for e in encodings]
    ).astype(bool)
    batch: Any = SimpleNamespace(
        texts=texts, start=start, offsets=offsets, special=special, token_ids=offsets[:, 0],
        tags=np.where(np.isin(np.arange(len(special)), start[:-1]) & tagged, 0, -1),
    )  # fmt: skip
    words = sum(len(text.split() if tagged else word_spans(text)) for text in texts)
    for shift in (0, 1):  # also counted with the blank before a word, as by some tokenizers
        wide = offsets.copy()
        if shift:
            inner = (offsets[:, 0] > 0) & ~special
            wide[inner, 0] -= [
                texts[np.searchsorted(start, row, "right") - 1][offsets[row, 0] - 1].isspace()
                for row in np.flatnonzero(inner)
            ]
        batch.offsets = wide
        begins = word_begins(batch)
        assert begins.sum() == words
        assert not begins[special].any()


def gold_of(store: FeatureStore, text: str) -> list[int]:
    """Return the label of a text, or the tags of its words."""
    assert store.features.task is not None
    if store.features.task.kind == "classification":
        return [int(text in RUSSIAN)]
    return [int(word[0].isupper()) for word in text.split()]


def predicted_labels(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> list[int]:
    """Return the label that a loaded student predicts for each text, or for the first piece of each
    word."""
    found = []
    for text in texts:
        read = tokenizer(text.split(), is_split_into_words=True, return_tensors="pt")
        words = read.word_ids()
        with torch.no_grad():
            best = model(**read).logits.argmax(dim=-1)[0]
        if best.ndim == 0:
            found.append(int(best))
        else:
            found += [int(best[words.index(word)]) for word in range(len(text.split()))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("student", [pytest.param(KINDS[0], marks=pytest.mark.apart), *KINDS[1:]])
def test_students_learn_gold_labels_and_load_again(
    classes: FeatureStore, tags: FeatureStore, tmp_path: Path, student: str
) -> None:
    for store, factory, labels in (
        (classes, AutoModelForSequenceClassification, MOODS),
        (tags, AutoModelForTokenClassification, TAGS),
    ):
        out = tmp_path / factory.__name__
        rate = "3e-2" if student.startswith("bilstm") else "4e-3"
        words = ("--student", student, "--loss", "ce=1", "--lr", rate, "--epochs", 20)
        said = ok(main, "--store", store.path, "--out", out, *SMALL, *words, "--held-out", 0.2)
        assert "valid_accuracy" in said
        assert student != "bert:16x2x2" or "layers 1+2, 3+4 of 4, cut to 16" in said
        result = report_of(out)["result"]
        assert result["valid_accuracy"] > 0.8
        model = factory.from_pretrained(out)
        assert model.config.id2label == dict(enumerate(labels))
        tokenizer = AutoTokenizer.from_pretrained(out)
        answers = predicted_labels(model.eval(), tokenizer, (*ENGLISH[:4], *RUSSIAN[:4]))
        wanted = [label for text in (*ENGLISH[:4], *RUSSIAN[:4]) for label in gold_of(store, text)]
        right = np.array(answers) == np.array(wanted)
        for label in range(2):  # of each label most, not of both together
            assert right[np.array(wanted) == label].mean() > 0.7, (student, labels[label])


def test_accuracy_is_of_the_gold_labels_and_agreement_of_the_teachers(
    classes: FeatureStore,
) -> None:
    model, collator, options = prepared(classes, loss={"ce": 1.0, "kl": 1.0}, held_out=0.4)
    with torch.no_grad():
        for weight in model.parameters():  # so that its outputs differ between texts
            weight.mul_(20 if weight.ndim > 1 else 1)
    distiller = Distiller.of(model, options, classes)
    _, held_out = split_blocks(classes, options.held_out)
    found = validated(distiller, classes, collator, options)
    gold, judged, teacher, answers = list[int](), list[int](), list[int](), list[int]()
    for number in (n for begin, end in held_out.tolist() for n in range(begin, end)):
        record = classes[number]
        read = collator.student_tokenizer(record.text, return_tensors="pt")
        with torch.no_grad():
            printed = int(model(**read).logits.argmax())
        if record.label is not None:
            gold.append(record.label)
            judged.append(printed)
        teacher.append(int(record.views[0].class_logits.argmax()))
        answers.append(printed)
    right, agreed = np.equal(gold, judged), np.equal(teacher, answers)
    assert found["valid_accuracy"] == pytest.approx(np.mean(right))
    assert found["valid_agreement"] == pytest.approx(np.mean(agreed))
    assert 10 < len(right) < len(agreed) and 0 < sum(right) < len(right)
    assert found["valid_accuracy_matthews"] == pytest.approx(matthews_corrcoef(gold, judged))
    assert found["valid_agreement_matthews"] == pytest.approx(matthews_corrcoef(teacher, answers))
    assert warning_of_one_label(found) == ""
    with torch.no_grad():
        for weight in model.parameters():  # the same label for every text
            weight.zero_()
    found = validated(distiller, classes, collator, options)
    assert found["valid_agreement_matthews"] == 0 < found["valid_agreement"]
    assert "all labels of the student are the same" in warning_of_one_label(found)


def losses_by_kinds() -> list[Any]:
    """Every loss runs with one kind of student, and every kind with several losses; all others run
    with `apart`."""
    losses = [*OF_ANY_TASK, "sentence", "sentence-gelu", "sentence-gelu-half", "sentence-kld"]
    return [
        pytest.param(student, loss, marks=() if (row + column) % 3 == 0 else pytest.mark.apart)
        for row, loss in enumerate(losses)
        for column, student in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("student", "loss"), losses_by_kinds())
def test_every_loss_of_a_task_falls(
    classes: FeatureStore, tags: FeatureStore, student: str, loss: str
) -> None:
    for store in (classes, tags) if loss in OF_ANY_TASK else (classes,):
        model, collator, options = prepared(store, student=student, loss={loss: 1.0})
        batch = first_batch(store, collator, 600)
        distiller = Distiller.of(model, options, store)
        optimizer = torch.optim.AdamW(distiller.parameters(), lr=1e-2)
        found = []
        for _ in range(12):
            value = distiller(batch)[loss]
            value.backward()
            # the student learns, not a projection alone
            assert model.get_input_embeddings().weight.grad.any()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(value.detach()))
        assert found[-1] < 0.97 * found[0], store.path


@pytest.mark.slow
def test_stages_over_labelled_and_all_text(
    classes: FeatureStore, tags: FeatureStore, tmp_path: Path
) -> None:
    for store, recipe in ((classes, "simple-stagewise"), (tags, "tinymbert-d4-2")):
        out = tmp_path / recipe
        words = ("--recipe", recipe, "--student", "bilstm:12,10", "--steps", 3, *SMALL)
        ok(main, "--store", store.path, "--out", out, *words)
        report = report_of(out)
        steps = {"simple-stagewise": 1 + 3, "tinymbert-d4-2": 3 + 4 + 4}
        assert report["result"]["steps"] == 3 * steps[recipe]
        assert "valid_ce" in report["result"] and "valid_hidden-kld" not in report["result"]


def test_what_a_recipe_lacks_is_reported_in_a_line(
    classes: FeatureStore, tmp_path: Path, tiny_teacher: Teachers
) -> None:
    corpus = tmp_path / "plain.txt"
    corpus.write_text("\n".join(ENGLISH), "utf-8")
    model = tiny_teacher("bert", "classification", MOODS)
    settings = {"head": "classification", "logits": None, "hidden": "layer:4"}
    unlabelled = dumped(model, corpus, tmp_path / "u.zarr", **settings)
    plain = dumped(tiny_teacher("bert"), corpus, tmp_path / "p.zarr")
    few = tmp_path / "few.tsv"
    rows = [f"{text}\t{MOODS[0] if n == 0 else ''}" for n, text in enumerate(RUSSIAN * 3)]
    few.write_text("\n".join(["sentence\tmood", *rows]) + "\n", "utf-8")
    columns = {"text_column": "sentence", "label_column": "mood"}
    mostly = dumped(model, few, tmp_path / "m.zarr", head="classification", logits=None, **columns)
    cases: tuple[tuple[Path | str, Words, tuple[str, ...]], ...] = (
        (unlabelled, ("--loss", "ce=1"), ("no gold labels", "--label-column")),
        (unlabelled, ("--recipe", "simple-stagewise"), ("stage", "no gold labels")),
        (plain, ("--recipe", "tinymbert-d1"), ("--loss ce", "has no task head")),
        (classes.path, ("--loss", "mlm=1"), ("is for classification", "no masked-LM head")),
        (
            classes.path,
            ("--loss", "attention=1", "--student", "bilstm:8,8"),
            ("has no attention maps",),
        ),
        (plain, ("--data", "labelled"), ("--data labelled", "no gold labels")),
        (classes.path, ("--loss", "ce=1,kl=1", "--mask-words", "sideways"), ("uniform", "rare")),
        (
            mostly,
            ("--loss", "ce=1", "--best"),
            ("--best: no held-out", "a gold label", "hold out more"),
        ),
    )
    for store, words, printed in cases:
        line = refused(main, "--store", store, "--out", tmp_path / "out", *SMALL, *words)
        says(line, *printed)
        assert not (tmp_path / "out").exists()
    said = ok(main, "--store", unlabelled, "--out", tmp_path / "out", *SMALL[2:], "--steps", 2,
              "--student", "16x1x2", "--vocab", "teacher")  # fmt: skip
    assert "1 kl + 30 hidden;" in said  # losses that the store supports


@pytest.mark.slow
def test_a_sweep_over_recipes(classes: FeatureStore, tmp_path: Path) -> None:
    recipes = ["simple-rnn", "simple-once", "simple-joint", "simple-hard"]
    words = [word for name in recipes for word in ("--recipe", name)]
    words += ["--student", "bilstm:8,8"]
    out = tmp_path / "sweep"
    said = ok(sweep, "--store", classes.path, "--out", out, *words, "--steps", 2, *SMALL)
    assert "valid_accuracy" in said and "simple-once" in said
    rows = json.loads((out / "sweep.json").read_text())
    assert [row["recipe"] for row in rows] == recipes


def test_gold_labels_that_are_together_are_held_out_too(
    tmp_path: Path, tiny_teacher: Teachers
) -> None:
    texts = (ENGLISH + RUSSIAN) * 6
    rows = [f"{text}\t{MOODS[n % 2] if n < 40 else ''}" for n, text in enumerate(texts)]
    corpus = tmp_path / "texts.tsv"
    corpus.write_text("\n".join(["sentence\tmood", *rows]) + "\n", "utf-8")
    words = {"head": "classification", "logits": None, "text_column": "sentence"}
    model = tiny_teacher("bert", "classification", MOODS)
    store = open_store(dumped(model, corpus, tmp_path / "a.zarr", **words, label_column="mood"))
    train, held = split_blocks(store, 0.15)
    assert has_gold(store, train) and has_gold(store, held)
    both = sorted((*map(tuple, train.tolist()), *map(tuple, held.tolist())))
    assert both == [tuple(block) for block in store.blocks(128).tolist()]
    share = sum(end - begin for begin, end in held.tolist()) / len(store)
    assert 0.08 < share < 0.25
