"""sts: a bi-encoder learns similarity, and its scores equal plain transformers and numpy."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModel, AutoTokenizer

from teachonce.downstream.settings import FineTuneSettings
from teachonce.downstream.tasks.classify import Classify
from teachonce.downstream.tasks.fine_tune import fine_tune, score_as_is
from teachonce.downstream.tasks.pair import Pair
from teachonce.downstream.tasks.sts import BiEncoder, SentenceSimilarity
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError
from tests.downstream.learnable import phrase, splits, table
from tests.downstream.support import done, scores_of
from tests.downstream.test_models import saved
from tests.making.models import Teachers, Tokenizers
from tests.making.sentence_folders import changed

LEARNING = FineTuneSettings(epochs=4, batch_size=8, lr=3e-3, seeds=1)


def alike(path: Path, size: int, seed: int, header: str = "text_a text_b score") -> Path:
    """Make pairs with score 5 if both texts contain the same animal, otherwise 1."""
    draws, animals = np.random.default_rng(seed), ("teacher", "keeper")
    rows = []
    for number in range(size):
        a, b = animals[number % 2], animals[number // 2 % 2]
        rows.append(
            (phrase(draws, a), phrase(draws, b, *["lamp"] * (number % 3)), 1 + 4 * (a == b))
        )
    return table(path, header, rows)


@cache
def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def embedded(folder: Path, text: str) -> Floats:
    """Return the mean of the last states of a single text without padding."""
    tokenizer, model = loaded(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        states = model(input_ids=ids).last_hidden_state
    return np.asarray(states[0].numpy().mean(0), np.float64)


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def correlations(folder: Path, pairs: list[Pair]) -> dict[str, float]:
    found = [cosine(embedded(folder, one.text_a), embedded(folder, one.text_b)) for one in pairs]
    gold = [pair.score for pair in pairs]
    return {
        "spearman": float(spearmanr(gold, found).statistic),
        "pearson": float(pearsonr(gold, found).statistic),
    }


def student(kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, folder: Path) -> Path:
    if kind == "bilstm":
        return saved(make_tokenizer("wordpiece"), folder, None)
    if kind == "classifier":
        return tiny_teacher("bert", "classification", ("other", "same"))
    return tiny_teacher(kind)


@pytest.mark.parametrize(
    "kind", ["bert", "classifier", "roberta", "modernbert", "distilbert", "bilstm"]
)
def test_any_encoder_is_scored_as_it_is(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    """Padding, batches and the checkpoint's head do not change the scores of an encoder."""
    model = student(kind, tiny_teacher, make_tokenizer, tmp_path / "model")
    test, task = alike(tmp_path / "test.tsv", 20, 0), SentenceSimilarity()
    result = score_as_is(task, str(model), {"test": test}, say=lambda _: None)
    found = result["mean"]["test"]
    expected = correlations(model, task.read(test))
    assert found["pearson"] == pytest.approx(expected["pearson"], abs=1e-4)
    assert found["primary"] == found["spearman"] == pytest.approx(expected["spearman"], abs=0.02)
    assert result["primary"] == "spearman" and list(result["measures"]) == ["Spearman", "Pearson"]


def test_the_labels_of_a_head_that_is_not_used_may_be_equal(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_teacher("bert", "classification", ("x", "y")), tmp_path / "model")
    changed(model, "config.json", id2label={"0": "x", "1": "x"}, label2id={"x": 0})
    files = {"test": alike(tmp_path / "test.tsv", 8, 0)}
    assert score_as_is(SentenceSimilarity(), str(model), files)["mean"]["test"]
    table(tmp_path / "labels.tsv", "text label", [("a", "x")])
    with pytest.raises(UserError, match="is number 1 in id2label"):
        score_as_is(Classify(), str(model), {"test": tmp_path / "labels.tsv"})


@pytest.mark.parametrize("kind", ["modernbert", "bilstm"])
def test_it_learns_and_a_kept_model_scores_as_it_did(
    kind: str, tiny_teacher: Teachers, make_tokenizer: Tokenizers, tmp_path: Path
) -> None:
    model = student(kind, tiny_teacher, make_tokenizer, tmp_path / "model")
    files = splits(alike, tmp_path, ".tsv", train=96, dev=32, test=40)
    task, keep, quiet = SentenceSimilarity(), tmp_path / "kept", lambda _: None
    before = score_as_is(task, str(model), {"test": files["test"]}, say=quiet)["mean"]["test"]
    tuned = fine_tune(task, str(model), files, LEARNING, quiet, keep)["mean"]["test"]
    # half of the scores are 5: no order of cosines has a Spearman above 0.87
    assert tuned["spearman"] > 0.8 > 0.5 > before["spearman"]
    again = score_as_is(SentenceSimilarity(), str(keep), {"test": files["test"]}, say=quiet)
    assert again["mean"]["test"] == pytest.approx(tuned, abs=1e-3)


def test_the_loss_is_the_squared_error_of_the_cosine(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    """Scores from 2 to 7 are 0 to 1. The texts of a batch differ in length."""
    folder, task = tiny_teacher("roberta"), SentenceSimilarity()
    pairs = [
        Pair("old lamp", "the stairs of the tower", 2),
        Pair("light", "moss", 4),
        Pair("a market", "a market", 7),
    ]
    task.prepare({"train": pairs})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BiEncoder(AutoModel.from_pretrained(folder).eval())
    batch = task.collator(tokenizer)(task.encode(tokenizer, pairs, 64))
    assert batch["input_ids"].shape[:2] == (3, 2)
    with torch.inference_mode():
        loss = model(**batch).loss
    found = [cosine(embedded(folder, one.text_a), embedded(folder, one.text_b)) for one in pairs]
    errors = np.array(found) - np.array([0, 2 / 5, 1])
    assert float(loss) == pytest.approx(float(np.mean(errors**2)), abs=1e-5)
    assert found[2] == pytest.approx(1)


def test_each_text_has_its_own_limit(make_tokenizer: Tokenizers) -> None:
    task, tokenizer = SentenceSimilarity(), make_tokenizer("wordpiece")
    (row,) = task.encode(tokenizer, [Pair("lamp " * 40, "old lamp", 1)], 16)
    assert [len(ids) for ids in row["input_ids"]] == [16, len(tokenizer("old lamp")["input_ids"])]


def test_the_command_tunes(tiny_teacher: Teachers, tmp_path: Path) -> None:
    train = alike(tmp_path / "train.jsonl", 24, 0, "one two score")
    columns = ("--text-a-column", "one", "--text-b-column", "two")
    out, model = tmp_path / "out", tiny_teacher("bert")
    assert "Spearman" in done(
        *("--task", "sts", "--model", model, "--train", train, "--dev", train, "--out", out),
        *("--seeds", 1, "--epochs", 1, "--accumulate", 2, "--batch-size", 4, *columns),
    )
    found = scores_of(out)
    assert found["task"] == "sts" and found["settings"]["accumulate"] == 2


def test_equal_scores_and_a_model_that_cannot_pad_are_refused(
    tiny_teacher: Teachers, tmp_path: Path
) -> None:
    same = table(tmp_path / "b.tsv", "text_a text_b score", [("a", "b", 1.0), ("b", "c", 1.0)])
    test = alike(tmp_path / "a.tsv", 8, 0)
    for model, file, message in (
        ("bert", same, r"--test: every score is 1 \(from .*b.tsv, line 2 on\)"),
        ("gpt2", test, "has no padding token"),
    ):
        with pytest.raises(UserError, match=message):
            score_as_is(SentenceSimilarity(), str(tiny_teacher(model)), {"test": file})
