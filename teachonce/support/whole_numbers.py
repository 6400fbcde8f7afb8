"""Reads whole numbers from untrusted text."""

from __future__ import annotations

import re

MOST_DIGITS = 18  # they fit int64; above 4,300 of them int() raises ValueError
# Not \d, which matches the digits of every script.
DIGITS = f"[0-9]{{1,{MOST_DIGITS}}}"


def whole_number(word: str, most: int = MOST_DIGITS) -> int | None:
    """Parse a number of at most `most` ASCII digits; return None for any other text."""
    return int(word) if len(word) <= most and re.fullmatch(DIGITS, word) else None
