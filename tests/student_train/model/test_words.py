"""A vocabulary of lower-cased words between spaces, for the RNN of Mukherjee & Awadallah 2019."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from teachonce.align import Vocabulary
from teachonce.store import FeatureStore
from teachonce.student_train.cli import main
from teachonce.student_train.model.student_tokenizer import student_tokenizer
from teachonce.support.errors import UserError
from teachonce.training.wordpiece import SPECIALS
from tests.end_to_end.support import ok


def test_it_has_every_word_the_most_frequent_first(store: FeatureStore, tmp_path: Path) -> None:
    counts = Counter(word for text in store.texts() for word in text.lower().split())
    tokenizer: Any = student_tokenizer("words", store)
    assert len(tokenizer) == len(SPECIALS) + len(counts)
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert names[5:] == sorted(counts, key=lambda word: (-counts[word], word))
    few: Any = student_tokenizer("words:25", store)
    assert few.convert_ids_to_tokens(list(range(25))) == names[:25] and len(few) == 25
    text = f"{names[5].upper()} {names[6]}\tNeverSeen {names[30]}"
    few.save_pretrained(tmp_path)
    for each in (few, AutoTokenizer.from_pretrained(tmp_path)):
        read = each(text)["input_ids"]
        printed = ["[CLS]", names[5], names[6], "[UNK]", "[UNK]", "[SEP]"]
        assert each.convert_ids_to_tokens(read) == printed
    whole = Vocabulary.from_tokenizer_json(tokenizer.backend_tokenizer.to_str())
    assert whole.pieces[5].text == names[5].encode()


def test_a_size_without_a_place_for_a_word_is_refused(store: FeatureStore) -> None:
    with pytest.raises(UserError, match="words:5: leaves no room .* give 6 or more.*words$"):
        student_tokenizer("words:5", store)


def test_a_student_of_words_starts_with_their_vectors(store: FeatureStore, tmp_path: Path) -> None:
    tokenizer: Any = student_tokenizer("words", store)
    known = tokenizer.convert_ids_to_tokens([5, 9])
    vectors = tmp_path / "v.txt"
    vectors.write_text("".join(f"{word} 1 2 3\n" for word in known), "utf-8")
    words = ("--store", store.path, "--vocab", "words", "--student", "bilstm:3,4", "--steps", 1,
             "--device", "cpu", "--init", "random", "--word-vectors", vectors)  # fmt: skip
    said = ok(main, *words, "--out", tmp_path / "a")
    assert f"word embeddings of 2 of {len(tokenizer):,} pieces from v.txt" in said
