"""Alignments equal those in the files that `golden/make.py` wrote from stored texts and
tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from teachonce.align import (
    FlatText,
    Tokens,
    Vocabulary,
    VocabularyMap,
    align_match,
    align_reduce,
    align_span,
)
from tests.align.support import check_runs

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "alignments.json").read_text(encoding="utf-8"))


def tokens_of(kind: str) -> Tokens:
    kept = GOLDEN["tokens"][kind]
    return Tokens(
        np.array(kept["ids"], np.uint32),
        np.array(kept["offsets"], np.int32),
        np.array(kept["special"], bool),
        np.array(kept["start"], np.int64),
    )


def file_of(kind: str) -> str:
    return (FOLDER / f"{kind}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", GOLDEN["tokens"])
def test_the_kept_tokenizers_still_give_the_kept_tokens(kind: str) -> None:
    encodings = Tokenizer.from_str(file_of(kind)).encode_batch(GOLDEN["texts"])
    kept = GOLDEN["tokens"][kind]
    assert [piece for encoding in encodings for piece in encoding.tokens] == kept["pieces"]
    assert [list(span) for encoding in encodings for span in encoding.offsets] == kept["offsets"]


@pytest.mark.parametrize(
    "kept", GOLDEN["alignments"], ids=lambda kept: f"{kept['teacher']}-{kept['student']}"
)
def test_golden(kept: dict[str, Any]) -> None:
    text = FlatText.of(GOLDEN["texts"])
    teacher, student = tokens_of(kept["teacher"]), tokens_of(kept["student"])
    vocabulary = VocabularyMap.between(
        Vocabulary.from_tokenizer_json(file_of(kept["teacher"])),
        Vocabulary.from_tokenizer_json(file_of(kept["student"])),
    )
    reduced = align_reduce(teacher, vocabulary, kept["reduce_max_length"])
    span = align_span(text, teacher, student)
    check_runs(GOLDEN["texts"], teacher, student, span)
    for name, found in (
        ("match", align_match(text, teacher, student, vocabulary)),
        ("span", span),
        ("reduce", reduced.alignment),
    ):
        assert [found.teacher.tolist(), found.student.tolist()] == kept[name]
    assert reduced.tokens.ids.tolist() == kept["reduced_ids"]
    assert reduced.tokens.start.tolist() == kept["reduced_start"]
    assert reduced.unknown.tolist() == kept["reduced_unknown"]
