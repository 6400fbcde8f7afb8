"""A student's side of a store: a sample, its tokens, and pieces as people read them."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from teachonce.align import AlignmentError, Tokenizations, Tokens
from teachonce.align.vocabulary import byte_of_character
from teachonce.store.errors import VERIFY, StoreError
from teachonce.store.read.plain_tokenizer import is_plain
from teachonce.store.read.store import FeatureStore
from teachonce.store.read.stored_tokenizer import within_bounds
from teachonce.store.tools.show import Pieces
from teachonce.student_train.data.student_tokens import tokenize
from teachonce.student_train.data.vocabularies import check_vocabulary, vocabulary_map
from teachonce.student_train.model.student_tokenizer import (
    check_pair_form,
    default_max_length,
    student_tokenizer,
)
from teachonce.student_train.settings.alignments import ALIGNMENTS
from teachonce.student_train.settings.option_values import is_made_of_text
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.training.wordpiece import fewer_pieces


class Names:
    """Writes the pieces of a tokenizer for people, by its tokenizer.json.

    A byte-level piece (GPT-2's alphabet) is written in its letters, blanks as the tokenizer has
    them (`Ġ`), and bytes of a part of a letter as `<D0>`. `unknown` is the piece that stands for
    what cannot be spelled, or None.
    """

    def __init__(self, tokenizer: str | None) -> None:
        settings: dict[str, Any] = json.loads(tokenizer) if tokenizer else {"model": {}}
        parts = json.dumps([settings.get("pre_tokenizer"), settings.get("decoder")])
        self.byte_level, model = '"ByteLevel"' in parts, settings["model"]
        self.unknown: str | None = model.get("unk_token")
        if model.get("unk_id") is not None:
            self.unknown = model["vocab"][model["unk_id"]][0]

    def written(self, piece: str) -> str:
        """Write a piece."""
        alphabet = byte_of_character()
        if not self.byte_level or not all(letter in alphabet for letter in piece):
            return piece
        raw = bytes(alphabet[letter] for letter in piece)
        letters = raw.decode("utf-8", "surrogateescape")
        return "".join(_letter(each) for each in letters)


def _letter(letter: str) -> str:
    """Write a letter; what shows no ink in GPT-2's alphabet, and a byte as its number."""
    if "\udc80" <= letter <= "\udcff":
        return f"<{ord(letter) - 0xDC00:X}>"
    if letter.isprintable() and not letter.isspace():
        return letter
    return "".join(_character_of_byte()[byte] for byte in letter.encode())


@cache
def _character_of_byte() -> dict[int, str]:
    return {byte: character for character, byte in byte_of_character().items()}


class WrittenPieces(Pieces):
    """Names the teacher's pieces as people read them."""

    def __init__(self, store: FeatureStore) -> None:
        super().__init__(store)
        held = "tokenizer.json" in store.teacher_files()
        self.names = Names(store.teacher_file("tokenizer.json").decode() if held else None)

    def name(self, number: int) -> str:
        """Return a piece by its id, or the id where nothing names it."""
        return self.names.written(super().name(number))


def direction(text: str) -> str:
    """Tell which way a text runs, by its first letter that has a direction: `ltr` or `rtl`."""
    kinds = (unicodedata.bidirectional(letter) for letter in text)
    return "rtl" if next((k for k in kinds if k in ("L", "R", "AL")), "L") != "L" else "ltr"


BLOCK_TOKENS = 4096


@dataclass(frozen=True)
class Sample:
    """Blocks [n, 2] of consecutive sequences, and how many sequences there are in them and in
    `all` of the store."""

    blocks: Array
    sequences: int
    all: int

    @property
    def whole(self) -> bool:
        return self.sequences == self.all

    @property
    def told(self) -> str:
        """Which sequences these are: `all 24 sequences`, `8 of 24 sequences, spread evenly`."""
        if self.whole:
            return f"all {counted(self.all, 'sequence')}"
        return f"{self.sequences:,} of {counted(self.all, 'sequence')}, spread evenly"


def sample(store: FeatureStore, tokens: int) -> Sample:
    """Choose blocks of about `tokens` tokens together, spread evenly over a store; all of a store
    that has no more. Always the same ones."""
    blocks, most = store.blocks(BLOCK_TOKENS), max(1, tokens // BLOCK_TOKENS)
    if len(blocks) > most:
        blocks = blocks[np.linspace(0, len(blocks) - 1, most).astype(int)]
    return Sample(blocks, int(np.diff(blocks, axis=1).sum()), len(store))


VOCABULARY_TOKENS = 2**21
"""Tokens of the sample that a vocabulary is made of; a training makes it of all text."""


def check_tokenizer(store: FeatureStore) -> None:
    """Raise UserError for a store without the teacher's tokenizer."""
    if "tokenizer.json" not in store.teacher_files():
        raise UserError(
            f"{store.path}: holds no tokenizer.json of the teacher, and --vocab is compared with"
            " its pieces; leave --vocab away, or dump again"
        )


class Student:
    """Reads a store's text as a student with the vocabulary `word` does.

    `tokenizer` is that of transformers, `vocabulary` maps the teacher's pieces to its own; of a
    large store a vocabulary is made of the sample `made_of`. Raises UserError for a word that means
    no vocabulary, and as `student_tokenizer` does.
    """

    def __init__(self, word: str, store: FeatureStore) -> None:
        check_tokenizer(store)
        check_vocabulary(store)
        self.word, self.store, self.separator = word, store, store.features.separator
        self.made_of: Sample = sample(store, VOCABULARY_TOKENS)
        blocks = None if self.made_of.whole else self.made_of.blocks
        self.tokenizer = student_tokenizer(word, store, blocks)
        if self.separator is not None:
            check_pair_form(self.tokenizer, word, store)
        self.max_length = default_max_length(store.features.max_length)
        self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.enable_truncation(self.max_length)
        self._settings = self.backend.to_str()
        self._plain = is_plain(self._settings.encode())
        self._names = Names(self._settings)
        teacher = store.teacher_file("tokenizer.json").decode()
        self.vocabulary = vocabulary_map(teacher, self._settings)

    @property
    def note(self) -> str:
        """What is to be known of the vocabulary; "" where it is that of a training."""
        notes = [fewer_pieces(self.word, len(self.tokenizer))]
        if not self.made_of.whole and is_made_of_text(self.word):
            notes.append(
                f"made of {self.made_of.told}: a training makes it of all, so that pieces differ a"
                " little; give the folder of a student for its own"
            )
        return "; ".join(note for note in notes if note)

    def sides(self, texts: Sequence[str], teacher: Tokens) -> Tokenizations:
        """Put the student's tokens of some texts beside the teacher's."""
        texts = list(texts)
        native = self._tokens(texts)
        return Tokenizations(texts, teacher, native, self.vocabulary, self.max_length)

    def _tokens(self, texts: list[str]) -> Tokens:
        """Tokenise texts; where the tokenizer's work has no bound, in a process that has one."""
        if self._plain:
            return tokenize(self.backend, texts, self.separator)
        size = sum(len(text.encode()) for text in texts)
        found: dict[str, Any] = within_bounds(
            self._settings.encode(),
            size,
            self.store.path,
            dict,
            tokenized_there,
            *(self._settings, texts, self.separator),
        )
        return tokens_from(found)

    def name(self, number: int) -> str:
        """Write one of its pieces for people."""
        return self._names.written(self.backend.id_to_token(number) or str(number))

    def aligned(self, sides: Tokenizations) -> dict[str, tuple[Tokens, Any]]:
        """Align two sides in every way: by name the student's tokens, and the runs of both.

        Raises StoreError where the stored tokens do not fit the stored texts.
        """
        try:
            return {name: sides.align(name) for name in ALIGNMENTS}
        except AlignmentError as error:
            raise StoreError(f"{self.store.path}: {error}; {VERIFY}") from error

    def unknown(self, tokens: Tokens) -> Array:
        """Find the pieces that stand for what the vocabulary cannot spell: bool [S]."""
        if self.tokenizer.unk_token_id is None:
            return np.zeros(len(tokens.ids), bool)
        return np.asarray(tokens.ids == self.tokenizer.unk_token_id) & ~tokens.special


def tokenized_there(settings: str, texts: list[str], separator: str | None) -> dict[str, Any]:
    found = tokenize(Tokenizer.from_str(settings), texts, separator)
    names = ("ids", "offsets", "special", "start", "types")
    return {name: np.asarray(getattr(found, name)).tolist() for name in names}


def tokens_from(found: dict[str, Any]) -> Tokens:
    """Read the tokens that another process wrote as JSON."""
    dtypes = {"ids": np.int64, "offsets": np.int32, "special": bool, "start": np.int64}
    arrays = {name: np.array(found[name], dtype) for name, dtype in dtypes.items()}
    arrays["offsets"] = arrays["offsets"].reshape(-1, 2)
    return Tokens(**arrays, types=np.array(found["types"], np.uint8))
