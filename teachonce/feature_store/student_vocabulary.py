"""A student's vocabulary applied to the texts of a store."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from teachonce.align import AlignmentError, Tokenizations, Tokens
from teachonce.feature_store.piece_names import PieceNames
from teachonce.feature_store.spread_sample import SpreadSample, spread_sample
from teachonce.store.errors import VERIFY, StoreError
from teachonce.store.read.store import FeatureStore
from teachonce.store.read.stored_tokenizer import is_plain, within_bounds
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.vocabularies import check_teacher_vocabulary, vocabulary_map
from teachonce.student_train.model.student_tokenizer import (
    check_pair_form,
    default_max_length,
    student_tokenizer,
)
from teachonce.student_train.settings.option_values import is_made_of_text
from teachonce.student_train.settings.terms import ALIGNMENTS
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from teachonce.training.wordpiece import fewer_pieces

VOCABULARY_TOKENS = 2**21
"""Tokens of the sample from which a vocabulary is built; a training builds it from all text."""


class StudentVocabulary:
    """Tokenizes a store's texts as a student of `student-train --vocab VOCAB` does.

    `tokenizer` is a tokenizer of transformers. `piece_map` maps the teacher's pieces to the
    student's. If the store is large, the vocabulary is built from the sample `made_of`. Raises
    UserError if `vocab` is not a vocabulary, and as `student_tokenizer` does.
    """

    def __init__(self, vocab: str, store: FeatureStore) -> None:
        if "tokenizer.json" not in store.teacher_files():
            raise UserError(
                f"{store.path}: holds no tokenizer.json of the teacher, and --vocab is compared"
                " with its pieces; leave --vocab out, or dump again"
            )
        check_teacher_vocabulary(store)
        self.vocab, self.store, self.separator = vocab, store, store.features.separator
        self.made_of: SpreadSample = spread_sample(store, VOCABULARY_TOKENS)
        blocks = None if self.made_of.whole else self.made_of.blocks
        self.tokenizer = student_tokenizer(vocab, store, blocks)
        if self.separator is not None:
            check_pair_form(self.tokenizer, vocab, store)
        self.max_length = default_max_length(store.features.max_length)
        # A copy, because padding and truncation of `tokenizer` must not change.
        self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.enable_truncation(self.max_length)
        self._settings = self.backend.to_str()
        self._plain = is_plain(self._settings.encode())
        self._names = PieceNames(self._settings)
        teacher = store.teacher_file("tokenizer.json").decode()
        self.piece_map = vocabulary_map(teacher, self._settings)

    @property
    def note(self) -> str:
        """Describe how the vocabulary differs from the vocabulary that a training would build; ""
        if it does not."""
        notes = [fewer_pieces(self.vocab, len(self.tokenizer))]
        if not self.made_of.whole and is_made_of_text(self.vocab):
            notes.append(
                f"made of {self.made_of.summary}: a training uses all of them, so a few pieces"
                " differ; give the folder of a student to see its own vocabulary"
            )
        return "; ".join(note for note in notes if note)

    def tokenizations(self, texts: Sequence[str], teacher: Tokens) -> Tokenizations:
        """Tokenize texts for the student, and pair the result with the teacher's tokens."""
        texts = list(texts)
        native = self._tokens(texts)
        return Tokenizations(texts, teacher, native, self.piece_map, self.max_length)

    def _tokens(self, texts: list[str]) -> Tokens:
        """Tokenize texts; if the tokenizer is not plain, in a process with limits.

        The tokenizer.json of an untrusted folder may take unbounded time and memory.
        """
        if self._plain:
            return tokenize(self.backend, texts, self.separator)
        size = sum(len(text.encode()) for text in texts)
        # `within_bounds` calls `dict` only for a plain tokenizer, which is handled above.
        arrays: dict[str, Any] = within_bounds(
            self._settings.encode(),
            size,
            self.store.path,
            dict,
            tokenized_as_json,
            (self._settings, texts, self.separator),
        )
        return tokens_from_json(arrays)

    def name(self, number: int) -> str:
        """Return the piece with an id in readable form."""
        return self._names.readable(self.backend.id_to_token(number) or str(number))

    def align_all(self, tokenizations: Tokenizations) -> dict[str, tuple[Tokens, Any]]:
        """Return the student's tokens and the paired runs of each alignment, by its name.

        Raises StoreError if the stored tokens do not fit the stored texts.
        """
        try:
            return {name: tokenizations.align(name) for name in ALIGNMENTS}
        except AlignmentError as error:
            raise StoreError(f"{self.store.path}: {error}; {VERIFY}") from error

    def unknown(self, tokens: Tokens) -> Array:
        """Find the tokens that replace text which the vocabulary cannot spell: bool [S]."""
        if self.tokenizer.unk_token_id is None:
            return np.zeros(len(tokens.ids), bool)
        return np.asarray(tokens.ids == self.tokenizer.unk_token_id) & ~tokens.special


DTYPES = {
    "ids": np.int64, "offsets": np.int32, "special": bool, "start": np.int64, "types": np.uint8
}  # fmt: skip
"""Fields of `Tokens` that a process sends."""


def tokenized_as_json(settings: str, texts: list[str], separator: str | None) -> dict[str, Any]:
    """Tokenize texts with the tokenizer.json `settings`, and return the arrays of `Tokens` as
    lists, which a process can send as JSON.

    separator: text between the two texts of a pair; None if texts are not pairs.
    """
    tokens = tokenize(Tokenizer.from_str(settings), texts, separator)
    return {name: np.asarray(getattr(tokens, name)).tolist() for name in DTYPES}


def tokens_from_json(lists: dict[str, Any]) -> Tokens:
    """Read the tokens that `tokenized_as_json` returned."""
    arrays = {name: np.array(lists[name], dtype) for name, dtype in DTYPES.items()}
    arrays["offsets"] = arrays["offsets"].reshape(-1, 2)  # an empty list has one dimension
    return Tokens(**arrays)
