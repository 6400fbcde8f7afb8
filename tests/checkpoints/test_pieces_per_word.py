"""A tokenizer for another language is recognised; scripts without spaces give no warning."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from teachonce.checkpoints.pieces_per_word import note_on_pieces
from teachonce.training.wordpiece import train_wordpiece
from tests.making.texts import ENGLISH, RUSSIAN


def test_a_foreign_tokenizer_is_recognised() -> None:
    letters = "".join(sorted({letter for text in RUSSIAN for letter in text if letter.isalpha()}))
    whole, latin, english = (
        PreTrainedTokenizerFast(
            tokenizer_object=train_wordpiece([*texts] * 9, 30_000, None, more), unk_token="[UNK]"
        )
        for texts, more in (([*ENGLISH, *RUSSIAN], ""), (ENGLISH, ""), (ENGLISH, letters))
    )
    assert note_on_pieces(whole, RUSSIAN) == note_on_pieces(english, ENGLISH) == ""
    note = note_on_pieces(english, RUSSIAN)
    assert "splits a word of the text into 5." in note
    assert "made for another language, or its vocabulary is small; take a model" in note
    assert "no pieces for 100% of the text's words" in note_on_pieces(latin, RUSSIAN)
    assert note_on_pieces(english, RUSSIAN[:1]) == ""  # too few words
    han = ["\u6211\u4eec\u5728\u8fd9\u91cc\u7814\u7a76 "] * 30
    assert note_on_pieces(english, [*RUSSIAN, *han]) == ""
    numbers = ["314159265358979 1e-05,-0.25;"] * 200
    assert note_on_pieces(english, [*ENGLISH, *numbers]) == ""
