"""A BiLSTM student is fine-tuned, probed and measured like any other checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from teachonce.checkpoints.loading import input_limit
from teachonce.checkpoints.names import resolve_model
from teachonce.downstream.tasks.fine_tune import default_lr
from teachonce.downstream.tasks.pair import Pair, PairScore
from teachonce.store.format.features import TaskSpec
from teachonce.student_predict.cli import main as predict
from teachonce.student_train.model.kinds import make_student
from tests.downstream.learnable import asked, classified, entities, paired, write_tagged
from tests.downstream.support import done, refused, scores_of
from tests.end_to_end.support import Word, invoke
from tests.making.models import Teachers, Tokenizers
from tests.making.texts import SENTENCES


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
