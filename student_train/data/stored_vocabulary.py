"""Try the vocabulary that a store carries before a training uses it, within bounds."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from teachonce.align import Vocabulary, VocabularyMap
from teachonce.store import FeatureStore, StoreError, open_store
from teachonce.store.read.stored_tokenizer import within_bounds

LETTERS = "Aé"  # by which `teachonce.training.wordpiece` sees what a normaliser folds
LONGEST = 100  # characters that a normaliser makes of one


def check_vocabulary(store: FeatureStore) -> None:
    """Raise StoreError where reading the teacher's vocabulary takes time or memory without bounds.

    What takes none here takes none later: the functions give the same for the same.
    """
    data = store.teacher_file("tokenizer.json")
    reopened = store.path, store.source.options
    within_bounds(data, 10 * len(data), store.path, lambda: None, _try_vocabulary, *reopened)


def _try_vocabulary(path: str, options: dict[str, Any] | None) -> None:
    with closing(open_store(path, allow_partial=True, storage_options=options)) as store:
        vocabulary = Vocabulary.from_tokenizer_json(store.teacher_file("tokenizer.json").decode())
        VocabularyMap.between(vocabulary, vocabulary)
        normalizer = store.tokenizer().normalizer
        for letter in LETTERS if normalizer else "":
            if len(normalizer.normalize_str(letter)) > LONGEST:
                raise StoreError(f"{path}: the tokenizer in it makes a whole text of one letter")
