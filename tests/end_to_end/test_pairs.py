"""Pairs of texts: teachers that classify or score pairs, their stores, and students of them.

- Pairs of texts: a teacher that classifies pairs, its store, and students of it.
- Students of a teacher that classifies pairs learn what depends on both texts.
- Rerankers: a number for each pair of texts, and students that CrossEncoder loads.
"""

import copy
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
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

from teachonce.feature_store.cli import main as feature_store
from teachonce.store import FeatureStore, open_store
from teachonce.store.tools.copy import convert
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from teachonce.student_train.cli import main
from teachonce.student_train.cli import main as student_train
from teachonce.support.errors import UserError
from teachonce.teacher_dump.cli import main as teacher_dump
from teachonce.teacher_dump.comparison import rerun
from teachonce.training.wordpiece import SPECIALS
from tests.end_to_end.support import Words, ok, refused, says
from tests.making.dumps import dump_options, dumped
from tests.making.models import Teachers, Tokenizers
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


def test_a_pruned_student_of_pairs_still_reads_token_types(
    tmp_path: Path, pairs: FeatureStore
) -> None:
    words = ("--student", "bert:16x1x2", "--vocab", "teacher", "--prune-to", "300", "--steps", 1)
    out = tmp_path / "s"
    ok(main, "--store", pairs.path, "--out", out, *words, "--device", "cpu")
    assert set(AutoTokenizer.from_pretrained(out)("a b", "b")["token_type_ids"]) == {0, 1}


NOISE = ("moss", "stone", "river", "clock", "map", "letters")
Row = tuple[str, str, int]


def row(chance: random.Random) -> Row:
    """Make pairs of texts of three words with label 1 if the middle words are equal."""
    lamps = [chance.random() < 0.5 for _ in range(2)]
    one, two = (
        f"{chance.choice(NOISE)} {'lamp' if lamp else 'ships'} {chance.choice(NOISE)}"
        for lamp in lamps
    )
    return one, two, int(lamps[0] == lamps[1])


def rows(seed: int, count: int) -> list[Row]:
    chance = random.Random(seed)
    return [row(chance) for _ in range(count)]


def answers(model: Any, tokenizer: Any, some: list[Row]) -> torch.Tensor:
    read = tokenizer(
        [a for a, _, _ in some], [b for _, b, _ in some], padding=True, return_tensors="pt"
    )
    logits: torch.Tensor = model(**read).logits
    return logits


def accuracy(model: Any, tokenizer: Any, some: list[Row]) -> float:
    with torch.no_grad():
        best = answers(model.eval(), tokenizer, some).argmax(dim=1)
    return float((best == torch.tensor([label for _, _, label in some])).float().mean())


def reader_of_pairs(make_tokenizer: Tokenizers, **head: Any) -> tuple[Any, Any]:
    """Make an untrained BERT with such a head, and a tokenizer that returns the token types of a
    pair."""
    torch.manual_seed(0)
    tokenizer = copy.deepcopy(make_tokenizer("wordpiece"))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    network = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=128, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=tokenizer.pad_token_id, **head,
        )
    )  # fmt: skip
    return network, tokenizer


def trained_reader(make_tokenizer: Tokenizers) -> tuple[Any, Any]:
    """Fine-tune a BERT on pairs in the plain way; return it with its tokenizer."""
    network, tokenizer = reader_of_pairs(make_tokenizer, id2label=dict(enumerate(LABELS)))
    optimizer, chance = torch.optim.AdamW(network.parameters(), lr=3e-3), random.Random(1)
    for _ in range(130):
        some = [row(chance) for _ in range(64)]
        labels = torch.tensor([label for _, _, label in some])
        torch.nn.functional.cross_entropy(answers(network, tokenizer, some), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert accuracy(network, tokenizer, rows(7, 200)) > 0.95
    return network, tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "align"), [("a.zarr", "span"), pytest.param("a.h5", "match", marks=pytest.mark.apart)]
)
def test_a_student_learns_pairs_from_the_store_alone(
    tmp_path: Path, pair_teacher: Path, out: str, align: str
) -> None:
    corpus = tmp_path / "pairs.csv"
    lines = [f"{a},{b}" for a, b, _ in rows(3, 600)]  # without labels
    corpus.write_text("\n".join(["one,two", *lines]) + "\n", "utf-8")
    hidden = {"hidden": "layer:2", "attention": "none"}
    store = dumped(pair_teacher, corpus, tmp_path / out, **PAIR, **hidden)
    words: Words = ("--student", "bert:32x2x4", "--vocab", "60", "--steps", 220)
    words += ("--lr", "3e-3", "--align", align, "--loss", "logit=1,hidden=1")
    words += ("--batch-tokens", 1024, "--device", "cpu", "--precision", "fp32")
    ok(main, "--store", store, "--out", tmp_path / "student", *words)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "student")
    student = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")
    assert student.config.id2label == dict(enumerate(LABELS))
    assert set(tokenizer("moss", "stone")["token_type_ids"]) == {0, 1}
    card = (tmp_path / "student" / "README.md").read_text()
    assert '"text_pair": "Another text."' in card
    predict = pipeline("text-classification", str(tmp_path / "student"))
    said: list[Any] = [predict({"text": a, "text_pair": b}) for a, b, _ in rows(5, 20)]
    assert {answer["label"] for answer in said} == set(LABELS)
    new = rows(11, 300)
    found = accuracy(student, tokenizer, new)
    alone = [sum(label for a, _, label in new if ("lamp" in a) == lamp) for lamp in (True, False)]
    sizes = [sum(("lamp" in a) == lamp for a, _, _ in new) for lamp in (True, False)]
    # the best that can be known of the first text alone
    first = sum(max(n, size - n) for n, size in zip(alone, sizes, strict=True)) / len(new)
    assert first < 0.6 and found > 0.9, (first, found)


IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}
ONE: dict[str, Any] = {"num_labels": 1, "sentence_transformers": IDENTITY}
ASKED: Words = ("--head", "score", "--text-column", "one,two", "--device", "cpu")


@pytest.fixture(scope="module")
def teacher(
    pair_teacher: Path, tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Tokenizers
) -> Path:
    """Save a BERT with one output, high if the middle words of both texts are equal: a third of the
    difference of the classifier's two logits."""
    trained: Any = AutoModelForSequenceClassification.from_pretrained(pair_teacher)
    network, tokenizer = reader_of_pairs(make_tokenizer, **ONE)
    network.bert.load_state_dict(trained.bert.state_dict())
    for own, both in zip(
        network.classifier.parameters(), trained.classifier.parameters(), strict=True
    ):
        own.data = (both.data[1:] - both.data[:1]) / 3
    folder = tmp_path_factory.mktemp("reranker")
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def store(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    corpus = folder / "pairs.csv"
    lines = [f"{a},{b}" for a, b, _ in rows(3, 600)]
    corpus.write_text("\n".join(["one,two", *lines]) + "\n", "utf-8")
    words = ("--model", teacher, "--corpus", corpus, "--out", folder / "a.zarr")
    printed = ok(teacher_dump, *words, *ASKED, "--hidden", "layer:2")
    says(printed, "features  logits a score of each pair, hidden layer:2, attention none")
    return folder / "a.zarr"


def predicted(folder: Path, pairs: list[tuple[str, str]]) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu").predict(pairs, batch_size=16)


@pytest.mark.slow
def test_scores_match_the_library(teacher: Path, store: Path) -> None:
    fs = open_store(store)
    assert fs.features.task and fs.features.task.is_score and not fs.features.attention
    records = [fs[i] for i in range(40)]
    kept = np.array([record.views[0].class_logits[0] for record in records])
    pairs = [(record.texts[0], record.texts[1]) for record in records]
    assert np.allclose(kept, predicted(teacher, pairs), atol=1e-4)
    says(ok(feature_store, "info", store), "task        a score of pairs of texts")
    says(ok(feature_store, "show", store, "0"), f"score {kept[0]:.4g}")
    ok(feature_store, "verify", store, "--model", teacher, "--device", "cpu")


@pytest.mark.slow
def test_a_student_ranks_as_its_teacher(store: Path, teacher: Path, tmp_path: Path) -> None:
    words: Words = (
        "--store", store, "--student", "bert:32x2x4", "--vocab", "60", "--lr", "3e-3",
        "--batch-tokens", "1024", "--device", "cpu", "--precision", "fp32",
    )  # fmt: skip
    printed = ok(student_train, *words, "--out", tmp_path / "default", "--steps", "2")
    says(printed, "1 logit + 1 margin", "valid_spearman")
    loss = ("--loss", "logit=1,margin=1,hidden=1")
    ok(student_train, *words, *loss, "--out", tmp_path / "s", "--steps", "220")
    pairs = [(a, b) for a, b, _ in rows(11, 200)]
    own, wanted = predicted(tmp_path / "s", pairs), predicted(teacher, pairs)
    assert own.min() < -0.1  # no sigmoid, as the teacher has none
    assert np.corrcoef(own, wanted)[0, 1] > 0.9
    card = (tmp_path / "s" / "README.md").read_text()
    says(card, "pipeline_tag: text-ranking", 'CrossEncoder("this folder")')


def test_refused(store: Path, teacher: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    corpus = tmp_path / "pairs.csv"
    corpus.write_text("one,two\nA text.,Another.\n", "utf-8")
    words: Words = ("--model", teacher, "--corpus", corpus, "--out", tmp_path / "a.zarr")
    line = refused(teacher_dump, *words, "--head", "score")
    says(line, "--head score: a score needs two texts; name their columns, --text-column A,B")
    line = refused(teacher_dump, *words, *ASKED, "--label-column", "one")
    says(line, "--label-column one: a score has no classes")
    classes = tiny_teacher("bert", "classification", ("yes", "no"))
    line = refused(teacher_dump, "--model", classes, *words[2:], *ASKED)
    says(line, "--head score needs one output, and the checkpoint has 2; use --head classific")
    line = refused(student_train, "--store", store, "--loss", "kl=1", "--out", tmp_path / "s")
    says(line, "--loss kl: the teacher of", "gives one score and has no classes")
