"""Stage II: a student starts from the stored embeddings and trains from the store alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from teachonce.align import Vocabulary, VocabularyMap
from teachonce.store import open_store
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.student_train.cli import main as student_train
from teachonce.student_train.model.kinds import make_student
from teachonce.student_train.model.start import initialise
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok
from tests.teacher_dump.mixed_vocab.support import LONGEST, PIECES, WIDTH


def vocabulary_map(store: Any, tokenizer: Any) -> VocabularyMap:
    return VocabularyMap.between(
        Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode()),
        Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str()),
    )


def test_stage_two_starts_from_exactly_these_rows(trained: Any, tmp_path: Path) -> None:
    store = open_store(trained[0])
    stored = MixedVocab.of(store).embeddings
    tokenizer = student_tokenizer("mixed-vocab", store)
    assert len(tokenizer) == PIECES and tokenizer.mask_token == "[MASK]"
    found = vocabulary_map(store, tokenizer)
    for kind in ("", "modernbert:"):
        student = make_student(f"{kind}{WIDTH}x2x2", tokenizer, LONGEST)
        said = initialise(student, "mixed-vocab", store, found)
        words = student.get_input_embeddings().weight
        assert isinstance(words, torch.Tensor)
        assert torch.equal(words, torch.from_numpy(stored)) and f"all {PIECES} pieces" in said[0]
        assert student.get_output_embeddings().weight is words
    with pytest.raises(
        UserError, match=f"hidden size {WIDTH} and the student's 32; choose --student 16xLxA"
    ):
        initialise(make_student("32x2x2", tokenizer, LONGEST), "mixed-vocab", store, found)
    other = student_tokenizer("400", store)
    student = make_student(f"{WIDTH}x2x2", other, LONGEST)
    with pytest.raises(UserError, match="use --vocab mixed-vocab"):
        initialise(student, "mixed-vocab", store, vocabulary_map(store, other))


def test_stage_two_trains_from_the_store_alone(trained: Any, tmp_path: Path) -> None:
    words = ("--store", trained[0], "--vocab", "mixed-vocab", "--init", "mixed-vocab")
    size = ("--student", f"{WIDTH}x2x2", "--batch-tokens", "256", "--device", "cpu")
    said = ok(student_train, *words, *size, "--steps", "2", "--out", tmp_path / "student")
    assert f"word embeddings of all {PIECES} pieces" in said
    assert len(AutoTokenizer.from_pretrained(tmp_path / "student")) == PIECES
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "student").config.vocab_size == PIECES
