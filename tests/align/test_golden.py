"""Alignments equal those in the files that `golden/make.py` wrote from stored texts and
tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teachonce.align import FlatText, Tokens, Vocabulary, VocabularyMap
from tests.align.golden.make import alignments_of

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "alignments.json").read_text(encoding="utf-8"))


def tokens_of(kind: str) -> Tokens:
    dtypes = {"ids": np.uint32, "offsets": np.int32, "special": bool, "start": np.int64}
    kept = GOLDEN["tokens"][kind]
    return Tokens(**{name: np.array(kept[name], dtype) for name, dtype in dtypes.items()})


def vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary.from_tokenizer_json((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "kept", GOLDEN["alignments"], ids=lambda kept: f"{kept['teacher']}-{kept['student']}"
)
def test_golden(kept: dict[str, Any]) -> None:
    kinds = kept["teacher"], kept["student"]
    vocabulary = VocabularyMap.between(*map(vocabulary_of, kinds))
    text, sides = FlatText.of(GOLDEN["texts"]), (tokens_of(kinds[0]), tokens_of(kinds[1]))
    found = alignments_of(text, sides, vocabulary, kept["reduce_max_length"])
    assert found | dict(zip(("teacher", "student"), kinds, strict=True)) == kept
