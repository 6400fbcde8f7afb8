"""Pieces as people read them: byte-level ones in letters, not in bytes."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

from teachonce.align.vocabulary import byte_of_character
from teachonce.store import FeatureStore
from teachonce.store.tools.show import Pieces


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
