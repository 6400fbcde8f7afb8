"""Students of a teacher that classifies pairs learn what depends on both texts."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from teachonce.student_train.cli import main
from tests.end_to_end.support import Words, ok
from tests.end_to_end.test_pairs import LABELS, PAIR
from tests.making.dumps import dumped
from tests.making.models import Tokenizers

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
