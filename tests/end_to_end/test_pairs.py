"""Pairs of texts: a teacher that classifies pairs, its store, and students of it."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, UserError, open_store
from teachonce.store.tools.copy import convert
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.comparison import rerun
from teachonce.training.wordpiece import SPECIALS
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dump_options, dumped
from tests.making.models import Teachers
from tests.making.texts import ENGLISH, RUSSIAN
from tests.store.dying import unsealed
from tests.student_train import support

LABELS = ("other", "same")
PAIR = {"head": "classification", "logits": None, "text_column": "one,two"}
SMALL = ("--vocab", "300", "--batch-tokens", "512", "--device", "cpu")


def reading_types(folder: Path, out: Path) -> Path:
    """Copy a teacher, with a tokenizer that returns token types, as BERT's does."""
    shutil.copytree(folder, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    tokenizer.save_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).model_input_names == names
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make pairs with a label, a label's name or no label; the last two are long, and two lack a
    text."""
    chance = random.Random(1)
    rows: list[dict[str, str | None]] = [
        {"one": a, "two": b, "gold": LABELS[(a in ENGLISH) == (b in ENGLISH)] if n % 4 else ""}
        for n in range(24)
        for a, b in [chance.sample(ENGLISH + RUSSIAN, 2)]
    ]
    rows += [{"one": ENGLISH[0], "two": "", "gold": LABELS[0]}, {"one": None, "two": RUSSIAN[0]}]
    rows += [{"one": "", "two": " ", "gold": ""}]  # no text at all
    long = " ".join(ENGLISH + RUSSIAN)
    rows += [{"one": long, "two": RUSSIAN[1]}, {"one": long, "two": long}]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = (json.dumps({"gold": None} | row, ensure_ascii=False) for row in rows)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def pairs(
    tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Teachers, corpus: Path
) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store")
    model = reading_types(tiny_teacher("bert", "classification", LABELS), folder / "bert")
    options = {**PAIR, "label_column": "gold", "hidden": "layer:4", "views": 2}
    return open_store(dumped(model, corpus, folder / "a.zarr", part_tokens=300, **options))


CASES = [
    ("bert", "a.zarr", {"views": 2, "hidden": "layer:4"}),
    ("bert", "typed.h5", {"codec": "small"}),
    ("roberta", "a.h5", {"codec": "exact"}),
    ("deberta", "a.zarr", {"hidden": "none", "attention": "none"}),
]


@pytest.mark.parametrize(("kind", "out", "options"), CASES)
def test_the_teacher_reads_both_texts_as_its_tokenizer_joins_them(
    tmp_path: Path, tiny_teacher: Teachers, corpus: Path, kind: str, out: str, options: Any
) -> None:
    model = tiny_teacher(kind, "classification", LABELS)
    if out.startswith("typed"):
        model = reading_types(model, tmp_path / "typed")
    words = {**PAIR, "label_column": "gold", "part_tokens": 300, "max_length": 100, **options}
    fs = open_store(dumped(model, corpus, tmp_path / out, **words))
    rows = [json.loads(line) for line in corpus.read_text("utf-8").splitlines()]
    rows = [row for row in rows if row["one"] or (row["two"] or "").strip()]
    assert len(fs) == len(rows) == 28 and fs.meta["parts"] > 1
    assert fs.features.task is not None and fs.features.task.separator == "\x1f"
    assert fs.identity["corpus"]["text_column"] == "one,two"
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    types = cut = 0
    for record, row in zip(fs, rows, strict=True):
        given = (row["one"] or "", row["two"] or "")
        if len(tokenizer(*given)["input_ids"]) <= 100:
            assert record.texts == given
        else:  # cut
            assert all(given[i].startswith(record.texts[i]) for i in range(2))
            cut += 1
        assert record.text == "\x1f".join(record.texts)
        one, two = ([text] for text in record.texts)  # "" counts as None unless it is in a list
        read = tokenizer(one, two, return_tensors="pt", return_offsets_mapping=True)
        offsets = read.pop("offset_mapping")[0].numpy()
        assert read["input_ids"][0].tolist() == record.token_ids.tolist()
        for (begin, end), shifted, number in zip(
            offsets, record.offsets, read.sequence_ids(), strict=True
        ):
            if number is not None:
                there = record.texts[number][begin:end]
                assert record.text[slice(*shifted)] == there and "\x1f" not in there
        with torch.no_grad():
            want = network(**read).logits[0].numpy()
        np.testing.assert_allclose(record.views[0].class_logits, want, atol=2e-5, rtol=1e-5)
        types += int("token_type_ids" in read)
    assert 2 <= cut < 20
    assert types == (len(fs) if out.startswith("typed") else 0)
    assert [record.label for record in fs][24:] == [0, None, None, None]
    assert verify(fs.path).problems == []
    found = rerun.check(fs, str(model), 99, 0, "cpu")
    assert found.problems == [] and found.notes == []


def test_long_pairs_are_cut_the_longer_text_first(pairs: FeatureStore) -> None:
    uneven, even = pairs[26], pairs[27]
    assert uneven.texts[1] == RUSSIAN[1] and ENGLISH[0] in uneven.texts[0]
    sizes = []
    for record in (uneven, even):
        assert 120 < len(record.token_ids) <= pairs.features.max_length == 128
        border = len(record.texts[0])
        own = record.offsets[~record.special]
        sizes.append([int((own[:, 0] < border).sum()), int((own[:, 0] > border).sum())])
        assert record.texts[0][-1].isalnum() or record.texts[0][-1] in ".,"  # between words
    assert abs(sizes[1][0] - sizes[1][1]) <= 12 and sizes[0][0] > 1.5 * sizes[0][1]


def test_masked_views_mask_words_of_both_texts(pairs: FeatureStore) -> None:
    sides = set[bool]()
    for record in pairs:
        spans = record.views[1].spans
        border = len(record.texts[0])
        assert not ((spans[:, 0] <= border) & (spans[:, 1] > border)).any()
        sides |= set((spans[:, 0] > border).tolist())
    assert sides == {False, True}


@pytest.mark.slow
def test_copies_and_a_dump_that_goes_on(tmp_path: Path, pairs: FeatureStore, corpus: Path) -> None:
    model = Path(pairs.path).parent / "bert"
    options = {**PAIR, "label_column": "gold", "hidden": "layer:4", "views": 2, "part_tokens": 300}
    half = dump_options(model, corpus, tmp_path / "half.h5", **options)

    with unsealed():
        dumped(model, corpus, Path(half.out), **options)
    assert list(open_store(half.out, allow_partial=True).texts()) == list(pairs.texts())
    dumped(model, corpus, Path(half.out), **options)
    convert(half.out, tmp_path / "b.zarr", "small")
    merge([half.out, pairs.path], tmp_path / "c.zarr", recode=True)
    for path, times in ((half.out, 1), (tmp_path / "b.zarr", 1), (tmp_path / "c.zarr", 2)):
        fs = open_store(path)
        assert fs.features.task == pairs.features.task
        assert [r.texts for r in fs] == [r.texts for r in pairs] * times
        assert verify(path).problems == []
        if path != half.out:  # which is in the merged store
            assert rerun.check(fs, str(model), 99, 0, "cpu").problems == []
    single = {**options, "text_column": "one", "limit": 100}
    alone = dumped(model, corpus, tmp_path / "single.zarr", **single)
    with pytest.raises(UserError, match=r"task\.separator is"):
        merge([half.out, alone], tmp_path / "d.zarr")
    said = ok(feature_store, "info", pairs.path)
    assert "classification of pairs of texts" in said
    said = ok(feature_store, "show", pairs.path, "3")
    assert all(text in said.replace("\n", " ") or text[:40] in said for text in pairs[3].texts)


STUDENTS = ("bert:16x2x2", "modernbert:16x2x2", "bilstm:12,10")


LOSS = {"ce": 1.0, "kl": 1.0, "hidden": 1.0}
prepared = partial(support.prepared, vocab="300", student="bert:16x2x2", loss=LOSS)


@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize("align", ["span", "match", "reduce"])
def test_the_student_reads_what_its_tokenizer_gives(
    pairs: FeatureStore, student: str, align: str
) -> None:
    model, collator, _ = prepared(pairs, student=student, align=align, max_length=90)
    tokenizer = collator.student_tokenizer
    typed = student == STUDENTS[0]
    assert ("token_type_ids" in tokenizer.model_input_names) == typed
    seen = 0
    for number, raw in enumerate(pairs.stream(0, 0, 512, features=collator.features())):
        batch = collator(raw, 0, (0, 0, number))
        texts = [pairs[int(i)].texts for i in raw.index]
        want = tokenizer(
            [a for a, _ in texts], [b for _, b in texts], truncation=True, padding=True,
            return_tensors="pt", return_token_type_ids=True,
        )  # fmt: skip
        assert torch.equal(batch.inputs.ids, want["input_ids"])
        assert torch.equal(batch.inputs.present, want["attention_mask"].bool())
        assert torch.equal(batch.inputs.types, want["token_type_ids"])
        second = batch.distillation.inputs
        if align == "reduce":  # the teacher's tokens in the student's pieces
            begins = (second.types.diff(dim=1) == 1).sum(dim=1)
            assert ((begins == 1) | ~second.present.all(dim=1)).all() and begins.max() == 1
            assert (second.types.sum(dim=1) > 0).all()
        else:
            assert second is None
        seen += len(texts)
    assert seen == len(pairs)


def test_a_student_is_reported_the_types_of_its_tokens(pairs: FeatureStore) -> None:
    from teachonce.student_train.train.distiller import Distiller

    model, collator, options = prepared(pairs)
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight.mul_(100)
    distiller = Distiller.of(model, options, pairs).eval()
    batch = support.first_batch(pairs, collator)
    with torch.no_grad():
        want = model.eval()(
            input_ids=batch.inputs.ids, attention_mask=batch.inputs.present.long(),
            token_type_ids=batch.inputs.types,
        )  # fmt: skip
        got = distiller.compute(batch).task_logits
        blind = replace(batch, inputs=replace(batch.inputs, types=None))
        without = distiller.compute(blind).task_logits
    torch.testing.assert_close(got, want.logits)
    assert got is not None and without is not None and not torch.allclose(got, without)


def test_what_has_no_pairs_is_refused_in_a_line(
    tmp_path: Path, tiny_teacher: Teachers, pairs: FeatureStore, corpus: Path
) -> None:
    words = ("--corpus", corpus, "--out", tmp_path / "a.zarr", "--device", "cpu")
    causal = ("--model", tiny_teacher("gpt2"), "--text-column", "one,two")
    line = refused(teacher_dump, *words, *causal)
    says(line, "--text-column one,two", "classification head", "is: causal")
    model = tiny_teacher("bert", "classification", LABELS)
    mixed = ("--model", tiny_teacher("bert"), "--width", 16, "--text-column", "one,two")
    says(refused(teacher_dump, "mixed-vocab", *words, *mixed), "is: mlm")
    assert not (tmp_path / "a.zarr").exists()
    learn = ("--store", pairs.path, "--out", tmp_path / "s", *SMALL[2:], "--steps", 1)
    folder = tmp_path / "plain"
    backend = Tokenizer.from_str(pairs.teacher_file("tokenizer.json").decode())
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS).save_pretrained(folder)
    printed = ("--vocab", "no token between the two texts of a pair", "such as 5k")
    says(refused(main, *learn, "--vocab", folder), *printed)
    alone = dumped(model, corpus, tmp_path / "one.zarr", **{**PAIR, "text_column": "one"})
    printed = ("one.zarr", "classifies single texts", "pairs of texts")
    says(refused(main, *learn, "--store", alone, "--vocab", "300"), *printed)


def test_a_student_of_pairs_that_is_pruned_still_tells_types(
    tmp_path: Path, pairs: FeatureStore
) -> None:
    words = ("--student", "bert:16x1x2", "--vocab", "teacher", "--prune-to", "300", "--steps", 1)
    out = tmp_path / "s"
    ok(main, "--store", pairs.path, "--out", out, *words, "--device", "cpu")
    assert set(AutoTokenizer.from_pretrained(out)("a b", "b")["token_type_ids"]) == {0, 1}
