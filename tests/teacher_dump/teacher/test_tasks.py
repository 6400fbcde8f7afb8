"""Stores of fine-tuned teachers contain the output of plain transformers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from teachonce.store import TaskSpec, UserError, open_store
from teachonce.store.tools.repair import repair
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from teachonce.teacher_dump.cli import main
from teachonce.teacher_dump.comparison import rerun
from teachonce.teacher_dump.teacher.forward import BatchOutput
from teachonce.teacher_dump.teacher.loading import load_teacher
from tests.end_to_end.support import ok, refused, says
from tests.making.dumps import dumped, write_corpus
from tests.making.models import Teachers
from tests.making.sentence_folders import changed
from tests.making.stores import copied
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.test_label_numbers import MOODS, TAGS, spans_of


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return texts with or without a label name; the last is longer than any window."""
    path = tmp_path_factory.mktemp("labelled") / "texts.tsv"
    cells = ["positive", MOODS[0], "", MOODS[2], "-1", "neither"]
    rows = [f"{text}\t{cells[i % 6]}" for i, text in enumerate(SENTENCES[:18])]
    rows.append(" ".join(SENTENCES[:30]) + "\tpositive")
    path.write_text("\n".join(["sentence\tmood", *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tagged") / "words.tsv"
    lines = []
    for number, text in enumerate(SENTENCES[:16]):
        words = text.split()
        lines += [f"{word}\t{TAGS[(number % 2 + i) % 3]}" for i, word in enumerate(words)] + [""]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_label_that_the_teacher_lacks_is_refused_before_its_weights_are_read(
    tmp_path: Path, tiny_teacher: Teachers, labelled: Path
) -> None:
    teacher = shutil.copytree(tiny_teacher("bert", "classification", ("a", "b")), tmp_path / "t")
    (teacher / "model.safetensors").write_bytes(b"damaged")
    words = ("--model", teacher, "--corpus", labelled, "--out", tmp_path / "s.zarr")
    columns = ("--text-column", "sentence", "--label-column", "mood")
    says(refused(main, *words, *columns), "texts.tsv, line 2", "has no label 'positive'; it has a")


def plain(factory: Any, folder: Path, ids: Array) -> dict[str, Array]:
    """Run one sequence with plain transformers."""
    model = factory.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    inputs = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        got = model.eval()(inputs, output_hidden_states=True, output_attentions=True)
    maps = torch.stack(got.attentions)[:, 0].mean(dim=(0, 1))
    last = got.hidden_states[-1][0]
    return {"logits": got.logits[0].numpy(), "last": last.numpy(), "attention": maps.numpy()}


@pytest.mark.parametrize(
    ("kind", "out", "options"),
    [
        ("bert", "a.zarr", {"hidden": "layer:4", "views": 2}),
        ("roberta", "a.h5", {"codec": "small"}),
        ("deberta", "a.h5", {"hidden": "none", "attention": "none"}),
        ("distilbert", "a.zarr", {"head": "auto"}),
        ("modernbert", "a.h5", {"attention": "none"}),
    ],
)
def test_classes(
    tmp_path: Path, tiny_teacher: Teachers, labelled: Path, kind: str, out: str, options: Any
) -> None:
    model = tiny_teacher(kind, "classification", MOODS)
    words: dict[str, Any] = {"head": "classification", "logits": None, "text_column": "sentence"}
    words |= {"label_column": "mood", "part_tokens": 300}
    fs = open_store(dumped(model, labelled, tmp_path / out, **words | options))
    assert fs.features.task == TaskSpec("classification", MOODS)
    assert fs.identity["corpus"]["label_column"] == "mood" and fs.features.logits is None
    assert [r.label for r in fs] == [1, 0, None, 2, None, 2] * 3 + [1]
    assert (
        len(fs) == 19 and len(fs[18].token_ids) <= fs.features.max_length and fs.meta["parts"] > 1
    )
    for record in (fs[0], fs[7], fs[18]):
        want = plain(AutoModelForSequenceClassification, model, record.token_ids)
        np.testing.assert_allclose(
            record.views[0].class_logits, want["logits"], atol=1e-5, rtol=1e-5
        )
        if "layer4" in fs.features.hidden:  # the [CLS] state of FORMAT.md: row 0 of the last layer
            error = np.abs(record.views[0].hidden["layer4"][0] - want["last"][0])
            mean, deviation = fs.calibration["layer4"]
            assert (error / deviation).max() <= np.abs(
                (want["last"] - mean) / deviation
            ).max() / 250
    if fs.features.views > 1:
        changed = [np.abs(r.views[1].class_logits - r.views[0].class_logits).max() for r in fs]
        assert np.mean(np.array(changed) > 1e-4) > 0.5
    assert verify(fs.path).problems == []
    found = rerun.check(fs, str(model), 99, 0, "cpu")
    assert found.problems == [] and found.notes == []
    assert {f"view{v}/classes" for v in range(fs.features.views)} <= {r.feature for r in found.rows}


@pytest.mark.parametrize(
    "kind",
    ["bert", *(pytest.param(kind, marks=pytest.mark.apart) for kind in ("xlmr", "modernbert"))],
)
def test_tags(tmp_path: Path, tiny_teacher: Teachers, tagged: Path, kind: str) -> None:
    model = tiny_teacher(kind, "tagging", TAGS)
    head = "auto" if kind == "modernbert" else "tagging"
    path = dumped(
        model, tagged, tmp_path / ("a.zarr" if kind == "bert" else "a.h5"), head=head, logits=None,
        hidden="none", max_length=16, part_tokens=300,
    )  # fmt: skip
    fs = open_store(path)
    assert fs.features.task == TaskSpec("tagging", TAGS) and len(fs) > 16
    sentences = tagged.read_text("utf-8").strip().split("\n\n")
    words = [[line.split("\t") for line in sentence.split("\n")] for sentence in sentences]
    spans = [spans_of([word for word, _ in sentence]) for sentence in words]
    seen = dict.fromkeys(range(16), 0)
    for record in fs:
        assert record.tags is not None
        for token, (begin, end) in enumerate(record.offsets + record.document_begin):
            tag = record.tags[token]
            if tag >= 0:
                (number,) = [
                    i for i, (b, e) in enumerate(spans[record.document]) if b < end and begin < e
                ]
                assert begin <= spans[record.document][number][0] and not record.special[token]
                assert TAGS[tag] == words[record.document][number][1]
                seen[record.document] += 1
        want = plain(AutoModelForTokenClassification, model, record.token_ids)["logits"]
        np.testing.assert_allclose(record.views[0].tag_logits, want, atol=1e-5, rtol=1e-5)
    assert seen == {number: len(sentence) for number, sentence in enumerate(words)}
    assert rerun.check(fs, str(model), 99, 0, "cpu").problems == [] == verify(path).problems


def test_a_dump_goes_on_where_it_was_killed(
    tmp_path: Path, tiny_teacher: Teachers, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_teacher("bert", "classification", MOODS)
    words = {"logits": None, "text_column": "sentence", "label_column": "mood", "part_tokens": 200}
    whole = open_store(dumped(model, labelled, tmp_path / "a.zarr", **words))
    from teachonce.teacher_dump.job import part_writing

    real, left = part_writing.dump_part, [2]

    def write(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise UserError("killed")
        real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="killed"):
        patch.setattr(part_writing, "dump_part", write)
        dumped(model, labelled, tmp_path / "b.zarr", **words)
    again = open_store(dumped(model, labelled, tmp_path / "b.zarr", **words))
    assert again.manifest.content() == whole.manifest.content()
    shutil.copytree(tmp_path / "b.zarr", tmp_path / "c.zarr")
    (tmp_path / "c.zarr/parts/0/sequence/label/c/0").unlink()
    assert repair(tmp_path / "c.zarr")[0] == whole.meta["parts"] - 1
    with pytest.raises(UserError, match=r"the corpus \(label_column\) is mood in the store"):
        dumped(model, labelled, tmp_path / "c.zarr", **words | {"label_column": None})
    mended = open_store(dumped(model, labelled, tmp_path / "c.zarr", **words))
    assert mended.manifest.content() == whole.manifest.content()


def test_another_teacher_of_the_task_is_reported(
    tmp_path: Path, tiny_teacher: Teachers, labelled: Path
) -> None:
    model = tiny_teacher("bert", "classification", MOODS)
    fs = open_store(
        dumped(model, labelled, tmp_path / "a.zarr", logits=None, text_column="sentence")
    )
    assert [record.label for record in fs] == [None] * 19
    with pytest.raises(UserError, match="its labels are a, b, c, the store's are negative, pos"):
        rerun.check(fs, str(tiny_teacher("bert", "classification", ("a", "b", "c"))), 9, 0, "cpu")
    with pytest.raises(UserError, match="another model than .* BertForMaskedLM here"):
        rerun.check(fs, str(tiny_teacher("bert")), 9, 0, "cpu")
    other = tmp_path / "other"
    network = AutoModelForSequenceClassification.from_pretrained(model)
    with torch.no_grad():
        network.classifier.weight[0] *= 1.05
    network.save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, other)
    found = rerun.check(fs, str(other), 9, 0, "cpu")
    assert len(found.problems) == 1 and found.problems[0].startswith("view0/classes: ")


def test_causal(tmp_path: Path, tiny_teacher: Teachers) -> None:
    model, corpus = tiny_teacher("gpt2"), write_corpus(tmp_path / "corpus.txt", 12)
    words = {"head": "causal", "hidden": "layer:4", "attention": "mean", "codec": "exact"}
    path = dumped(model, corpus, tmp_path / "a.zarr", **words)
    fs = open_store(path)
    logits = {"tier": "topk", "size": 8, "next_token": True, "observed": True, "ranked": True}
    assert fs.meta["features"]["logits"] == logits
    for record in (fs[0], fs[len(fs) - 1]):
        want = plain(AutoModelForCausalLM, model, record.token_ids)
        logs = torch.from_numpy(want["logits"]).log_softmax(-1).numpy()
        got = record.views[0].logits
        best = np.take_along_axis(logs, got.ids.astype(np.int64), axis=1)
        np.testing.assert_allclose(got.logprobs, best, atol=1e-4)
        np.testing.assert_allclose(record.views[0].hidden["layer4"], want["last"], atol=1e-4)
        np.testing.assert_allclose(record.views[0].attention["mean"], want["attention"], atol=1e-5)
        assert (best[:, 0] >= logs.max(axis=1) - 1e-4).all()
        assert not record.special.any()
    assert rerun.check(fs, str(model), 9, 0, "cpu").problems == [] == verify(path).problems


def test_a_head_is_never_made_up(tmp_path: Path, tiny_teacher: Teachers) -> None:
    bert, moods = tiny_teacher("bert"), tiny_teacher("bert", "classification", MOODS)
    tags = tiny_teacher("modernbert", "tagging", TAGS)
    for model, head, words in (
        (bert, "classification", "no classification head .*BertForMaskedLM.*--task classify"),
        (bert, "score", "no classification head .*BertForMaskedLM.*--task pair"),
        (bert, "tagging", "no tagging head .*BertForMaskedLM"),
        (moods, "tagging", "no tagging head .*BertForSequenceClassification"),
        # its parameters have the names and shapes of a classification head
        (tags, "classification", "no classification head .*ModernBertForTokenClassification"),
        (moods, "mlm", "no masked-LM head"),
        (tiny_teacher("gpt2"), "mlm", "no masked-LM head .*it is a GPT2LMHeadModel"),
        (tags, "causal", "no causal-LM head"),
    ):
        with pytest.raises(UserError, match=words):
            load_teacher(str(model), head=head, attention="none")
    nameless = copied(bert, tmp_path / "nameless")
    changed(nameless, "config.json", drop=("architectures",))
    with pytest.raises(UserError, match=r"no classification head \(missing: .*classifier"):
        load_teacher(str(nameless), head="classification", attention="none")
    causal = tiny_teacher("gpt2"), "causal"
    for model, head in ((bert, "mlm"), (moods, "classification"), (tags, "tagging"), causal):
        assert load_teacher(str(model), attention="none").head == head


def test_bad_input(tmp_path: Path, tiny_teacher: Teachers, labelled: Path, tagged: Path) -> None:
    moods = tiny_teacher("bert", "classification", MOODS)
    base = ["--model", moods, "--out", tmp_path / "a.zarr"]
    text = [*base, "--corpus", labelled, "--text-column", "sentence", "--device", "cpu"]

    def line(*words: Any) -> str:
        said = refused(main, *words)
        assert not (tmp_path / "a.zarr").exists()
        return said

    says(line(*text, "--label-column", "label"), "no column 'label' of labels", "'mood'", ".txt")
    says(line(*text, "--logits", "topk:8"), "--logits topk:8", "leave --logits out")
    words = ["--model", tiny_teacher("bert", "tagging", TAGS[:2]), "--out", tmp_path / "a.zarr"]
    says(line(*words, "--corpus", tagged), "words.tsv, line", "no tag 'I-PER'", "it has O, B-PER")
    words[1] = tiny_teacher("bert", "tagging", TAGS)
    wrong = tmp_path / "wrong.tsv"
    wrong.write_text(tagged.read_text("utf-8").replace("\tB-PER", "\tO", 1), "utf-8")
    says(line(*words, "--corpus", wrong), "wrong.tsv, line", "'I-PER' is after 'O'", "B-PER")
    rows = "".join(f'{{"text": "a b", "y": {value}}}\n' for value in ("1", "null", "1.0", "true"))
    (tmp_path / "a.jsonl").write_text(rows)
    said = line(*base, "--corpus", tmp_path / "a.jsonl", "--label-column", "y")
    says(said, "line 4", "no label 'True'", "it has negative, positive, neither")


def test_the_command_says_what_it_kept(
    tmp_path: Path, tiny_teacher: Teachers, labelled: Path
) -> None:
    unlabelled = write_corpus(tmp_path / "more.txt", 5)
    said = ok(
        main, "--model", tiny_teacher("bert", "classification", MOODS), "--corpus", labelled,
        "--corpus", unlabelled, "--text-column", "sentence", "--label-column", "mood",
        "--out", tmp_path / "a.h5", "--device", "cpu", "--max-length", "32",
    )  # fmt: skip
    says(said, "logits of 3 labels (classification)", "24 sequences of 24 documents")
    says(said, "13 sequences with a gold label", "23 of 24 texts longer than the window")
    labels = [record.label for record in open_store(tmp_path / "a.h5")]
    assert labels[18:] == [1, None, None, None, None, None]
    said = ok(
        main, "--model", tiny_teacher("bert", "classification", MOODS), "--corpus", labelled,
        "--text-column", "sentence", "--out", tmp_path / "b.h5", "--device", "cpu",
    )  # fmt: skip
    says(said, "0 sequences with a gold label; for the labels of a table give --label-column")


def test_sequences_of_a_batch_are_kept_apart() -> None:
    """If one sequence of a batch is not finite, the others are stored unchanged."""
    states, maps = np.arange(6.0)[:, None], [np.eye(1), np.eye(2), np.eye(3)]
    for of_sequences, logits, bad in (
        (True, np.array([[1.0, 2], [np.nan, 2], [3, 4]]), 1),
        (False, np.array([[0.0, 1], [1, 1], [2, 1], [3, 1], [4, np.inf], [5, 1]]), 2),
    ):
        known = BatchOutput(
            np.array([7, 8, 9]), np.array([1, 2, 3]), {"h": states}, {"a": maps},
            {"values": logits},            of_sequences,
        )  # fmt: skip
        found = known.unusable()
        assert found["logits"].tolist() == [i == bad for i in range(3)]
        assert not found["hidden h"].any() and not found["attention a"].any()
        kept = known.of(~found["logits"])
        assert kept.sequences.tolist() == [7, 9 if of_sequences else 8]
        first = kept.logits["values"][:, 0].tolist()
        assert (
            first == ([1, 3] if of_sequences else [0, 1, 2])
            and kept.unusable()["logits"].sum() == 0
        )
        assert len(kept.hidden["h"]) == kept.lengths.sum()
