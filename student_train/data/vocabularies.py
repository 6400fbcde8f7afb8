"""The vocabulary in a store: read within limits of time and memory, and mapped to a student's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from teachonce.align import AlignmentError, Vocabulary, VocabularyMap
from teachonce.store import FeatureStore, StoreError, open_store
from teachonce.store.read.stored_tokenizer import parse_tokenizer, within_bounds
from teachonce.support.errors import UserError

LETTERS = "Aé"  # `teachonce.training.wordpiece` normalises these to see what a normaliser folds
LONGEST = 100  # characters that a normaliser may make of one character


def check_teacher_vocabulary(store: FeatureStore) -> None:
    """Raise StoreError if reading the teacher's vocabulary exceeds the limits of time or memory."""
    # It is read again later without limits, by the same functions with the same result.
    data = store.teacher_file("tokenizer.json")
    reopened = store.source.address, store.source.options
    # The vocabulary is the input here, so the time that is granted grows with its file.
    within_bounds(data, 10 * len(data), store.path, lambda: None, _try_vocabulary, reopened)


def _try_vocabulary(path: str, options: dict[str, Any] | None) -> None:
    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        vocabulary = Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode())
        VocabularyMap.between(vocabulary, vocabulary)
        normalizer = store.tokenizer().normalizer
        for letter in LETTERS if normalizer else "":
            if len(normalizer.normalize_str(letter)) > LONGEST:
                raise StoreError(
                    f"{path}: its tokenizer's normalizer turns one letter into more than {LONGEST}"
                    " characters, so that a text could exhaust the memory; dump a teacher with"
                    " another tokenizer"
                )


def read_vocabulary(content: str, where: str) -> Vocabulary:
    """Read the vocabulary in the content of a tokenizer.json.

    Raises UserError, whose message begins with `where`, for a tokenizer that `align` cannot read.
    """
    try:
        return Vocabulary.from_tokenizer_json(content)
    except AlignmentError as error:
        raise UserError(f"{where}: {error}") from error


def has_teacher_tokenizer(vocab: str, stores: Sequence[FeatureStore], combined: bool) -> bool:
    """Return whether `--vocab` gives the tokens of all teachers: `teacher`, or a folder whose
    tokenizer.json splits texts as the teacher's does.

    combined: the stores count as one teacher; otherwise several stores are assumed to differ.
    """
    if len(stores) > 1 and not combined:
        return False
    if vocab == "teacher":
        return True
    file = Path(vocab, "tokenizer.json")
    if not file.is_file():
        return False
    teacher = stores[0].teacher_file("tokenizer.json")
    try:
        return _splits_alike(teacher, file.read_bytes())
    except (OSError, StoreError):  # reported when the tokenizer is loaded
        return False


@lru_cache(2)  # the students of a sweep mostly have one vocabulary
def _splits_alike(teacher: bytes, other: bytes) -> bool:
    # Read and written again: older files have merges in another form.
    one, two = (
        json.loads(parse_tokenizer(each, "tokenizer.json").to_str()) for each in (teacher, other)
    )
    parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    return all(one[part] == two[part] for part in parts)


@lru_cache(2)  # the students of a sweep mostly have one vocabulary
def vocabulary_map(teacher: str, student: str) -> VocabularyMap:
    """Map two vocabularies, each given as the content of a tokenizer.json.

    Raises UserError for a tokenizer that `align` cannot read.
    """
    try:
        return VocabularyMap.between(
            Vocabulary.from_tokenizer_json(teacher), Vocabulary.from_tokenizer_json(student)
        )
    except AlignmentError as error:
        raise UserError(
            f"the tokenizers of teacher and student cannot be aligned: {error}"
        ) from error
