"""Pieces as people read them."""

from __future__ import annotations

from teachonce.feature_store.piece_names import PieceNames, direction
from tests.making.models import Tokenizers


def test_byte_level_pieces_are_written_in_letters(make_tokenizer: Tokenizers) -> None:
    backend = make_tokenizer("bpe").backend_tokenizer
    names = PieceNames(backend.to_str())
    text = "Нева 🙂 x\n東"
    readable = [
        names.readable(token) for token in backend.encode(text, add_special_tokens=False).tokens
    ]
    joined = "".join(readable)
    assert joined.startswith("<D0><9D>е")  # a letter in two pieces, and one in a piece
    codes = joined.replace("Ġ", " ").replace("Ċ", "\n")
    raw, place = b"", 0
    while place < len(codes):
        byte = codes[place : place + 4]
        is_byte = byte[:1] == "<" and byte[3:] == ">"
        raw += bytes.fromhex(byte[1:3]) if is_byte else codes[place].encode()
        place += 4 if is_byte else 1
    assert raw == text.encode()
    assert names.unknown is None


def test_other_pieces_stay_as_they_are(make_tokenizer: Tokenizers) -> None:
    for kind, unknown in (("wordpiece", "[UNK]"), ("unigram", "<unk>")):
        names = PieceNames(make_tokenizer(kind).backend_tokenizer.to_str())
        assert names.unknown == unknown and names.readable("##ä▁é") == "##ä▁é"
    assert PieceNames(None).readable("17") == "17"


def test_the_way_that_a_text_runs() -> None:
    assert [direction(text) for text in ("1. كانت", "a كانت", "שלום", "12", "")] == [
        *("rtl", "ltr", "rtl", "ltr", "ltr")
    ]
