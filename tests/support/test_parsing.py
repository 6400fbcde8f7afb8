"""Whole numbers in untrusted text, and the parts that they name."""

from __future__ import annotations

import pytest

from teachonce.store.format.layout import part_number
from teachonce.support.parsing import whole_number


@pytest.mark.parametrize(
    "word", ["", "-1", "+5", "1_000", "1.5", " 1", "²", "٣", 19 * "9", 5000 * "9"]
)
def test_other_words_are_no_number(word: str) -> None:
    assert whole_number(word) is None and part_number(word) is None


def test_numbers() -> None:
    assert whole_number("007") == 7 and part_number("007") is None and part_number("7") == 7
    assert whole_number(18 * "9") == 10**18 - 1 and whole_number("100", 2) is None
