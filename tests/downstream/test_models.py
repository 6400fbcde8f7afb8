"""Models with a head are scored unchanged, and BiLSTM students like any other checkpoint.

- A model with a head is scored unchanged: with its own labels, without training or random weights.
- A BiLSTM student is fine-tuned, probed and measured like any other checkpoint.
"""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from teachonce.checkpoints.fields import SETTINGS
from teachonce.checkpoints.loading import input_limit
from teachonce.checkpoints.names import resolve_model
from teachonce.checkpoints.static import StaticConfig, StaticModel
from teachonce.downstream.tasks.fine_tune import default_lr
from teachonce.downstream.tasks.pair import Pair, PairScore
from teachonce.downstream.tasks.tagging import read_tagged
from teachonce.downstream.tasks.word_windows import joined, run_starts, word_pieces
from teachonce.store import TaskSpec
from teachonce.student_export.checking import export_check
from teachonce.student_export.loaded_student import load_student
from teachonce.student_predict.cli import main as predict
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from tests.downstream.support import (
    TAGS,
    asked,
    classified,
    compared,
    done,
    entities,
    paired,
    refused,
    scores_of,
    table,
    write_tagged,
)
from tests.end_to_end.support import Word, Words, invoke, ok
from tests.making.dumps import dumped
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed
from tests.making.stores import copied
from tests.making.texts import SENTENCES
from tests.teacher_dump.windows.test_label_numbers import TAGS as IOB

LABELS = ("STUDENT", "KEEPER", "TEACHER")  # not in the order of the alphabet


def scored(task: str, model: Path, test: Path, out: Path, *more: Word) -> Any:
    """Return the content of scores.json after a run that must succeed."""
    words = ("--task", task, "--as-is", "--model", model, "--test", test, "--out", out)
    said = done(*words, *more)
    assert "as is" in said and "±" not in said
    return scores_of(out)


def renamed(path: Path, size: int, seed: int) -> Path:
    return classified(path, size, seed, "sentence class")


@pytest.mark.parametrize(
    ("task", "write", "suffix", "more"),
    [
        ("pos", write_tagged, "", ("--max-length", 8)),
        ("ner", entities, "", ()),
        ("classify", renamed, ".csv", ("--text-column", "sentence", "--label-column", "class")),
        ("classify", compared, ".csv", ()),
        ("pair", paired, ".jsonl", ()),
    ],
)
def test_a_kept_model_scores_as_it_did_when_it_was_tuned(
    task: str,
    write: Callable[..., Path],
    suffix: str,
    more: Words,
    tiny_teacher: Teachers,
    tmp_path: Path,
) -> None:
    train, dev = (write(tmp_path / f"{size}{suffix}", size, size) for size in (40, 70))
    tuned, out = tmp_path / "tuned", tmp_path / "as-is"
    done(
        *("--task", task, "--model", tiny_teacher("roberta"), "--train", train, "--dev", dev),
        *("--out", tuned, "--save", "--seeds", 1, "--epochs", 2, "--lr", 3e-3, *more),
    )
    expected = scores_of(tuned)
    found = scored(task, tuned / "model", dev, out, *more)
    # floats are summed in another order: one different label would be a hundredth
    assert found["mean"]["test"] == pytest.approx(expected["mean"]["dev"], abs=1e-6)
    assert 0 < found["mean"]["test"]["primary"] < 1
    assert set(found["deviation"]["test"].values()) == {0} and found["examples"] == {"test": 70}
    assert f"{dev.name} (dev)" in done("--task", "table", tuned, out)


def test_a_student_of_a_classifier(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """Its scores are those of plain transformers with the saved folder."""
    train, test = (classified(tmp_path / f"{size}.tsv", size, size) for size in (60, 30))
    teacher = tiny_teacher("bert", "classification", LABELS)
    store = dumped(
        teacher, train, tmp_path / "store.zarr", head="classification", logits=None,
        text_column="text", label_column="label", hidden="layer:4",
    )  # fmt: skip
    student = tmp_path / "student"
    ok(
        *(student_train, "--store", store, "--out", student, "--student", "bilstm:12,10"),
        *("--vocab", "85", "--device", "cpu", "--precision", "fp32", "--batch-tokens", "256"),
        *("--loss", "ce=1", "--lr", "1e-2", "--epochs", "12"),
    )
    found = scored("classify", student, test, tmp_path / "out")["mean"]["test"]["accuracy"]
    model = AutoModelForSequenceClassification.from_pretrained(student).eval()
    tokenizer = AutoTokenizer.from_pretrained(student)
    right = 0
    for line in test.read_text().splitlines()[1:]:
        text, label = line.split("\t")
        logits = model(**tokenizer(text, return_tensors="pt")).logits
        right += model.config.id2label[int(logits.argmax())] == label
    assert found == pytest.approx(right / 30) and found > 0.5
    pairs = table(tmp_path / "pairs.tsv", "text_a text_b label", [("a", "b", LABELS[0])])
    words = ("--task", "classify", "--as-is", "--model", student, "--test", pairs)
    assert "is a pair, and the model was trained on single texts" in refused(*words, "--out", "no")
    (student / "training.json").write_text('{"lr": 3}')  # of another program
    again = scored("classify", student, test, tmp_path / "again")
    assert again["mean"]["test"]["accuracy"] == found


def test_a_tagger_of_words(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    """A tagger whose labels have another order than the file, and an additional one, is scored."""
    labels = ("VERB", "X", "NOUN", "DET", "ADJ")
    student = saved(make_tokenizer("wordpiece"), tmp_path / "s", TaskSpec("tagging", labels))
    test = write_tagged(tmp_path / "test", 30, 0)
    found = scored("pos", student, test, tmp_path / "out")["mean"]["test"]["accuracy"]
    model = AutoModelForTokenClassification.from_pretrained(student).eval()
    tokenizer = AutoTokenizer.from_pretrained(student)
    right = []
    for sentence in read_tagged(test):
        ids, pieces = word_pieces(tokenizer, *joined(sentence.words), 128)
        first = run_starts(pieces)
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        said = [labels[best[position]] for position in first]
        right += [tag == guess for tag, guess in zip(sentence.tags, said, strict=True)]
    assert len(right) == 180 and 0 < sum(right) < 180
    assert found == pytest.approx(sum(right) / 180)


def test_what_does_not_fit_is_refused(tiny_teacher: Teachers, tmp_path: Path) -> None:
    tags = write_tagged(tmp_path / "tags", 6, 0)
    wrong = tmp_path / "wrong"
    wrong.write_text("old\tO\nlamp\tI-PER\nold\tO\nlamp\tB-PER\n")  # neither IOB1 nor IOB2
    texts = table(tmp_path / "a.tsv", "text label", [("a", "KEEPER"), ("b", "SMITH")])
    pairs = paired(tmp_path / "a.csv", 9, 0)
    teachers = {
        "lm": tiny_teacher("bert"),
        "tagger": tiny_teacher("bert", "tagging", tuple(sorted(set(TAGS.values()) - {"VERB"}))),
        "entities": tiny_teacher("bert", "tagging", IOB),
        "classifier": tiny_teacher("bert", "classification", LABELS),
    }
    for task, model, test, message in (
        ("mlm", "classifier", texts, "has no masked-LM head"),
        ("pair", "tagger", pairs, "has no classification head"),
        ("pos", "classifier", tags, "has no tagging head"),
        (
            "pos",
            "tagger",
            tags,
            "tags, line 1: tag 'VERB' is unknown to the model, which has ADJ, DET",
        ),
        ("ner", "tagger", tags, "--model: tag 'ADJ' is neither O nor B-"),
        ("ner", "entities", wrong, "wrong, line 2: tag 'I-PER' is after 'O', without a PER"),
        (
            *("classify", "classifier", texts),
            "a.tsv, line 3: label 'SMITH' is unknown to the model, which has STUDENT, KEEPER",
        ),
        ("pair", "classifier", pairs, "has 3 labels"),
    ):
        out = tmp_path / "out"
        words = ("--task", task, "--as-is", "--model", teachers[model], "--test", test)
        with pytest.MonkeyPatch.context() as patch:
            if "unknown to the model" in message:  # before the weights are loaded
                patch.delattr("teachonce.checkpoints.loading.load_with_head")
            line = refused(*words, "--out", out)
        assert message in line
        assert not out.exists()
    more = ("--unseen-labels", "count")
    for task, model, test in (("pos", "tagger", tags), ("classify", "classifier", texts)):
        found = scored(task, teachers[model], test, tmp_path / task, *more)
        assert found["settings"]["unseen_labels"] == "count"
        assert 0 <= found["mean"]["test"]["accuracy"] < 1


def test_a_head_without_its_weights_is_refused(tiny_teacher: Teachers, tmp_path: Path) -> None:
    """transformers would initialise the head that the config declares."""
    model = copied(tiny_teacher("bert"), tmp_path / "model")
    changed(model, "config.json", architectures=["BertForSequenceClassification"])
    texts = classified(tmp_path / "a.tsv", 6, 0)
    words = ("--task", "classify", "--as-is", "--test", texts, "--out", tmp_path / "out")
    line = refused(*words, "--model", model)
    assert "has no classification head" in line and "classifier.bias" in line


def test_equal_gold_labels_are_no_failure_of_the_model(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Nor are wrong answers. Each of several models is named."""
    same, none = (write_tagged(tmp_path / name, 20, 0) for name in ("same", "none"))
    for path, tag in ((same, "NOUN"), (none, "O")):
        path.write_text(re.sub("\t.*", f"\t{tag}", path.read_text()))
    labels = tuple(sorted(set(TAGS.values())))
    one, other = (tiny_teacher("bert", "tagging", each) for each in (labels, labels[::-1]))
    entity_tagger, out = tiny_teacher("bert", "tagging", IOB), tmp_path / "pos"
    words: Words = ("--task", "pos", "--as-is", "--model", one, "--model", other)
    said = done(*words, "--test", same, "--out", out)
    found = scores_of(out)["seeds"]
    assert 0 < found[0]["test"]["accuracy"] < 1 and found[0]["test"]["matthews"] == 0
    assert "learnt nothing" not in said and not any("warning" in each for each in found)
    for model in (one, other):
        assert f"{model}: as is: " in said
        line = f"{model}: all tags of {same} are 'NOUN': Matthews cannot be computed"
        assert line in said.splitlines()
    words = ("--task", "ner", "--as-is", "--model", entity_tagger, "--unseen-labels", "count")
    said = done(*words, "--test", none, "--out", tmp_path / "none-scores")
    assert f"all tags of {none} are 'O': entity F1 and macro F1 cannot be computed" in said
    assert "learnt nothing" not in said
    wrong = entities(tmp_path / "wrong", 20, 0)  # of kinds that the model does not have
    said = done(*words, "--test", wrong, "--out", tmp_path / "wrong-scores")
    assert scores_of(tmp_path / "wrong-scores")["mean"]["test"]["entity_f1"] == 0
    assert "learnt nothing" not in said and "computed" not in said


def test_a_reranker_is_scored_by_its_activation(tiny_teacher: Teachers, tmp_path: Path) -> None:
    folder = tmp_path / "reranker"
    model = CrossEncoder(str(tiny_teacher("bert")), num_labels=1, device="cpu")
    with torch.no_grad():
        model.model.classifier.weight.mul_(200)  # else the sigmoid is almost linear
    model.save_pretrained(str(folder))
    given = PairScore().read(paired(tmp_path / "given.tsv", 20, 0))
    scores = model.predict([(each.text_a, each.text_b) for each in given]).tolist()
    rows = [(each.text_a, each.text_b, f"{n:.9f}") for each, n in zip(given, scores, strict=True)]
    test = table(tmp_path / "test.tsv", "text_a text_b score", rows)
    found = scored("pair", folder, test, tmp_path / "out")["mean"]["test"]
    assert found["pearson"] == pytest.approx(1, abs=1e-6)
    check = export_check(load_student(folder), test)
    assert check.student_score == pytest.approx(1, abs=1e-6)
    assert np.ptp(scores) > 0.1
    changed(folder, SETTINGS, activation_fn="torch.nn.modules.linear.Linear")
    line = refused(
        *("--task", "pair", "--as-is", "--model", folder, "--test", test, "--out", tmp_path / "no")
    )
    assert "activation 'Linear': cannot be applied to a score (" in line


def test_a_static_model_gives_vectors_only(tmp_path: Path) -> None:
    folder, file = tmp_path / "static", classified(tmp_path / "a.tsv", 6, 0)
    StaticModel(StaticConfig(vocab_size=50, hidden_size=8)).save_pretrained(folder)
    ways: tuple[Words, ...] = (("--test", file, "--as-is"), ("--train", file, "--dev", file))
    for task, words in itertools.product(("classify", "pos"), ways):
        line = refused("--task", task, "--model", folder, *words, "--out", tmp_path / "out")
        assert "is a static model, which gives vectors of texts only; score it with" in line
        assert "--task sts --as-is" in line


@pytest.fixture(scope="module")
def student(make_tokenizer: Tokenizers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a student with a masked LM."""
    return saved(make_tokenizer("wordpiece"), tmp_path_factory.mktemp("bilstm"), None)


def saved(tokenizer: Any, folder: Path, task: TaskSpec | None) -> Path:
    torch.manual_seed(0)
    make_student("bilstm:24,24", tokenizer, 64, task=task).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tuned(task: str, model: Path, train: Path, dev: Path, out: Path, *more: Word) -> Any:
    done(
        *("--task", task, "--model", model, "--train", train, "--dev", dev, "--out", out),
        *("--seeds", 1, "--epochs", 4, "--batch-size", 4, "--lr", 0.01, *more),
    )
    return scores_of(out)["mean"]["dev"]


@pytest.mark.slow
def test_it_learns_to_classify(student: Path, tmp_path: Path) -> None:
    train, dev = (classified(tmp_path / f"{size}.tsv", size, size) for size in (90, 30))
    out = tmp_path / "classify"
    assert tuned("classify", student, train, dev, out, "--save")["accuracy"] > 0.9
    kept = AutoModelForSequenceClassification.from_pretrained(out / "model")
    assert type(kept).__name__ == "BiLstmForSequenceClassification"
    assert sorted(kept.config.label2id) == ["KEEPER", "STUDENT", "TEACHER"]


def test_it_learns_pairs_and_entities(student: Path, tmp_path: Path) -> None:
    pairs = paired(tmp_path / "pairs.csv", 24, 0)
    found = tuned("pair", student, pairs, pairs, tmp_path / "pair", "--save")
    assert found["pearson"] > 0.5  # a student without information scores 0, within 0.2
    check_scale(PairScore().read(pairs), tmp_path / "pair/model", found["pearson"])
    train, dev = (entities(tmp_path / str(size), size, size) for size in (60, 30))
    assert tuned("ner", student, train, dev, tmp_path / "ner")["entity_f1"] > 0.8


def check_scale(pairs: list[Pair], folder: Path, pearson: float) -> None:
    """A saved head scores on the scale of its examples, and training continues from its weights."""
    from sentence_transformers import CrossEncoder

    texts, gold = [(each.text_a, each.text_b) for each in pairs], [each.score for each in pairs]
    scores = CrossEncoder(str(folder), device="cpu").predict(texts)
    assert np.corrcoef(scores, gold)[0, 1] == pytest.approx(pearson, abs=1e-4)
    assert np.mean((scores - gold) ** 2) < np.var(gold)
    answered = invoke(predict, folder, "--pairs", *map("\t".join, texts))
    own = [json.loads(line)["score"] for line in answered.stdout.splitlines()]
    assert own == pytest.approx(scores.tolist(), abs=1e-4)
    assert "on the scale of the training examples" in (folder / "README.md").read_text()
    tokenizer, again = PairScore().load_fresh(resolve_model(str(folder)))
    with torch.inference_mode():
        inputs = tokenizer(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt")
        standard = again.eval()(**inputs).logits[:, 0]
    assert standard.numpy() * np.std(gold) + np.mean(gold) == pytest.approx(scores, abs=1e-4)


def test_a_student_of_a_task_takes_another_head(make_tokenizer: Tokenizers, tmp_path: Path) -> None:
    task = TaskSpec("classification", ("a", "b", "c", "d"))
    student = saved(make_tokenizer("wordpiece"), tmp_path / "student", task)
    tags = write_tagged(tmp_path / "tags", 30, 0)
    assert tuned("pos", student, tags, tags, tmp_path / "pos")["accuracy"] > 0.9


def test_questions_are_refused_in_a_line(student: Path, tmp_path: Path) -> None:
    file = asked(tmp_path / "qa.json", 6, 0)
    words = ("--task", "qa", "--model", student, "--train", file, "--dev", file)
    assert "BiLstmConfig" in refused(*words, "--out", tmp_path / "qa")


def test_its_speed_is_measured(student: Path, tiny_teacher: Teachers, tmp_path: Path) -> None:
    done(
        *("--task", "speed", "--model", student, "--teacher", tiny_teacher("bert")),
        *("--repeat", 1, "--batch-size", 2, "--max-length", 32, "--out", tmp_path / "speed"),
    )
    row, _ = scores_of(tmp_path / "speed")["models"]
    weights = 4 * (24 * 24 + 24 * 24 + 2 * 24)  # unidirectional
    assert 2 * weights < row["parameters"] and row["cpu"]["batch_ms"] > 0
    assert row["disk_bytes"] == (student / "model.safetensors").stat().st_size


def test_masked_lm_training_begins_and_goes_on(student: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES * 3), encoding="utf-8")
    for model, more in (("scratch:bilstm:16,16", ("--vocab", 500)), (student, ())):
        done(
            *("--task", "mlm", "--model", model, "--train", text, *more, "--steps", 30),
            *("--batch-size", 8, "--max-length", 32, "--out", tmp_path / str(len(more))),
        )
        figures = json.loads((tmp_path / str(len(more)) / "metrics.json").read_text())
        assert figures["held_out_loss"] < figures["held_out_loss_before"]


def test_its_sizes_decide_nothing_but_the_rate(make_tokenizer: Tokenizers) -> None:
    tokenizer = make_tokenizer("wordpiece")
    for size in ("bilstm:8,8", "bilstm:8,400"):
        model = make_student(size, tokenizer, 64)
        assert default_lr(model) == 3e-3
        assert input_limit(model.config, tokenizer) == tokenizer.model_max_length
