"""Vocabulary pieces in readable form, and the writing direction of a text."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from teachonce.align.vocabulary import byte_of_character, character_of_byte
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.show import Pieces


class PieceNames:
    """Formats the pieces of a tokenizer for people, from its tokenizer.json.

    A byte-level piece (GPT-2's alphabet) is shown in its letters, spaces as in the tokenizer (`Ġ`),
    and the bytes of an incomplete letter as `<D0>`. `unknown` is the piece for text that the
    vocabulary cannot spell, or None.
    """

    def __init__(self, tokenizer: str | None) -> None:
        settings: dict[str, Any] = json.loads(tokenizer) if tokenizer else {"model": {}}
        # A byte-level step may be nested in a Sequence, so the JSON is searched as text.
        parts = json.dumps([settings.get("pre_tokenizer"), settings.get("decoder")])
        self.byte_level, model = '"ByteLevel"' in parts, settings["model"]
        self.unknown: str | None = model.get("unk_token")
        if model.get("unk_id") is not None:  # Unigram stores an index into its vocabulary
            self.unknown = model["vocab"][model["unk_id"]][0]

    def readable(self, piece: str) -> str:
        """Return a piece as text for people."""
        alphabet = byte_of_character()
        # An added token is stored as it is, and may have letters outside the alphabet.
        if not self.byte_level or not all(letter in alphabet for letter in piece):
            return piece
        raw = bytes(alphabet[letter] for letter in piece)
        # surrogateescape maps a byte that is not a complete character to U+DC80..U+DCFF.
        letters = raw.decode("utf-8", "surrogateescape")
        return "".join(_letter(letter) for letter in letters)


def _letter(letter: str) -> str:
    """Format a letter: invisible ones in GPT-2's alphabet, an escaped byte as its number."""
    if "\udc80" <= letter <= "\udcff":
        return f"<{ord(letter) - 0xDC00:X}>"
    if letter.isprintable() and not letter.isspace():
        return letter
    return "".join(character_of_byte()[byte] for byte in letter.encode())


class ReadablePieces(Pieces):
    """Returns the teacher's pieces in readable form."""

    def __init__(self, store: FeatureStore) -> None:
        super().__init__(store)
        has_tokenizer = "tokenizer.json" in store.teacher_files()
        tokenizer = store.teacher_file("tokenizer.json").decode() if has_tokenizer else None
        self.names = PieceNames(tokenizer)

    def name(self, number: int) -> str:
        """Return the piece with an id, or the id if the vocabulary has no piece for it."""
        return self.names.readable(super().name(number))


def direction(text: str) -> str:
    """Return the writing direction of a text, by its first letter that has one: `ltr` or `rtl`."""
    kinds = (unicodedata.bidirectional(letter) for letter in text)
    return "rtl" if next((k for k in kinds if k in ("L", "R", "AL")), "L") != "L" else "ltr"
