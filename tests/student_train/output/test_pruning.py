"""A finished student is cut to the pieces that two vocabularies have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ByT5Tokenizer,
)

from teachonce.store import FeatureStore, TaskSpec
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.pruning import pruned, shared_pieces
from teachonce.student_train.model.student_tokenizer import student_tokenizer, train_wordpiece
from teachonce.student_train.output.pruning import prune_student
from teachonce.support.errors import UserError
from tests.end_to_end.support import Words, ok, refused, report_of, says
from tests.making.models import Teachers
from tests.making.texts import ENGLISH

KINDS = ("16x2x2", "modernbert:16x2x2", "bilstm:8,8")


def folders(store: FeatureStore, root: Path, student: str, **changes: Any) -> tuple[Path, Path]:
    """Save a student with 400 pieces and random weights, and another tokenizer with 200."""
    torch.manual_seed(3)
    tokenizer = student_tokenizer("400", store)
    model = make_student(student, tokenizer, 64, **changes)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(root / "student")
    tokenizer.save_pretrained(root / "student")
    train_wordpiece(ENGLISH * 3, 200, None).save_pretrained(root / "small")
    return root / "student", root / "small"


@pytest.mark.parametrize("student", KINDS)
def test_a_pruned_student_says_of_the_kept_pieces_what_it_said(
    store: FeatureStore, tmp_path: Path, student: str
) -> None:
    whole, small = folders(store, tmp_path, student)
    count = prune_student(whole, str(small), tmp_path / "out" / "pruned")
    old, few = (AutoTokenizer.from_pretrained(folder) for folder in (whole, small))
    cut = AutoTokenizer.from_pretrained(tmp_path / "out/pruned")
    both = old.get_vocab().keys() & few.get_vocab().keys()
    assert cut.get_vocab().keys() == both and 5 < count == len(both) < 200
    assert sorted(cut.get_vocab().values()) == list(range(count))
    models = [AutoModelForMaskedLM.from_pretrained(f).eval() for f in (whole, tmp_path / "out/pruned")]  # fmt: skip  # noqa: E501
    assert models[1].config.vocab_size == count
    assert models[1].config.pad_token_id == cut.pad_token_id
    ids = cut(list(store.texts())[:4], padding=True, return_tensors="pt")
    assert ids["input_ids"][0, 0] == cut.cls_token_id and (ids["input_ids"] < count).all()
    rows = torch.tensor(old.convert_tokens_to_ids(cut.convert_ids_to_tokens(list(range(count)))))
    with torch.no_grad():
        mask = ids["attention_mask"]
        before = models[0](rows[ids["input_ids"]], attention_mask=mask).logits[..., rows]
        after = models[1](ids["input_ids"], attention_mask=mask).logits
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()])
    assert "from 400 to" in (tmp_path / "out/pruned/README.md").read_text()
    weights, card = (tmp_path / "out/pruned" / name for name in ("model.safetensors", "README.md"))
    assert weights.stat().st_mode == card.stat().st_mode  # other users may read both or neither


def test_the_student_of_a_task_keeps_its_labels(store: FeatureStore, tmp_path: Path) -> None:
    task = TaskSpec("tagging", ("O", "B", "I"))
    whole, small = folders(store, tmp_path, "16x2x2", task=task)
    prune_student(whole, small, tmp_path / "pruned")
    models = [AutoModelForTokenClassification.from_pretrained(f) for f in (whole, tmp_path / "pruned")]  # fmt: skip  # noqa: E501
    assert torch.equal(models[0].classifier.weight, models[1].classifier.weight)
    assert models[1].config.id2label == {0: "O", 1: "B", 2: "I"}


def test_a_static_student_reads_the_same_of_a_text(store: FeatureStore) -> None:
    """It still reads the end of a long text, and no special piece is in the mean."""
    tokenizer = student_tokenizer("400", store)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>"]})
    tokenizer.truncation_side = tokenizer.init_kwargs["truncation_side"] = "left"
    whole = make_student("static:16", tokenizer, 64)
    pieces = shared_pieces(tokenizer, train_wordpiece(ENGLISH * 3, 200, None), "small")
    student, cut = pruned(whole, tokenizer, pieces)
    assert cut.truncation_side == "left"
    special = cut.convert_ids_to_tokens(student.config.special_ids)
    assert special == tokenizer.convert_ids_to_tokens(whole.config.special_ids)
    assert "<mark>" in special


def test_what_cannot_be_pruned_is_refused_in_a_line(
    store: FeatureStore, tmp_path: Path, tiny_teacher: Teachers
) -> None:
    whole, small = folders(store, tmp_path, "16x2x2")
    (tmp_path / "empty").mkdir()
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    out = tmp_path / "pruned"
    for student, vocab, target, line in (
        (whole, tiny_teacher("roberta"), out, "is a BPE and the student's a WordPiece"),
        (whole, whole, out, "has all of the student's 400 pieces"),
        (tmp_path / "empty", small, out, "empty cannot be loaded as a model"),
        (whole, tmp_path / "empty", out, "empty cannot be loaded as a model with its tokenizer"),
        (whole, tmp_path / "slow", out, "slow: ByT5Tokenizer is not a fast tokenizer"),
        (whole, small, small, "small exists already"),
    ):
        with pytest.raises(UserError, match=line):
            prune_student(student, vocab, target)
        assert not out.exists()


def test_a_training_can_end_with_it(store: FeatureStore, tmp_path: Path) -> None:
    words: Words = ("--store", store.path, "--vocab", "400", "--student", "16x2x2", "--steps", "2")
    words = (*words, "--loss", "mlm=1", "--batch-tokens", "256", "--device", "cpu")
    ok(student_train, *words, "--prune-to", "250", "--out", tmp_path / "a")
    report = report_of(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "a")
    assert report["pruned"] == {"pieces": len(tokenizer), "of": 400}
    assert model.config.vocab_size == len(tokenizer) == 250
    assert report["result"]["parameters"] == model.num_parameters()
    assert f"from 400 to {len(tokenizer)} pieces" in (tmp_path / "a/README.md").read_text()
    out = tmp_path / "b"
    for word, printed in (
        ("nowhere", "--prune-to nowhere"),
        ("400", "has all of the student's 400"),
    ):
        says(refused(student_train, *words, "--prune-to", word, "--out", out), printed)
        assert not out.exists()
