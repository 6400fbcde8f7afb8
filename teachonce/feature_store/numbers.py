"""The numbers of sequences that `--sequence` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from teachonce.support.errors import UserError

MOST = 32
"""Sequences of a page: a browser is slow with more."""


def read_numbers(words: Sequence[str]) -> list[int]:
    """Read `--sequence 17,42`, each number once. Raises UserError for what is no number, and for
    too many."""
    found = list[int]()
    for word in ",".join(words).split(","):
        try:
            found.append(int(word))
        except ValueError:
            raise UserError(
                f"--sequence {','.join(words)}: expected numbers of sequences, such as 17,42, got"
                f" {word.strip()!r}"
            ) from None
    numbers = list(dict.fromkeys(found))
    if len(numbers) > MOST:
        raise UserError(f"--sequence: a page has {MOST} sequences at most, got {len(numbers)}")
    return numbers
