"""Sizes in bytes as people write them: `100GB`, `500M`, `1.5 GiB`."""

from __future__ import annotations

import re

from teachonce.support.errors import UserError

WORD = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i)?)?b?", re.IGNORECASE | re.ASCII)


def parse_size(word: str, where: str) -> int:
    """Read the bytes of a size: k, M, G and T are powers of 1,000, with an `i` of 1,024.

    Raises UserError, which begins with `where`, for any other word and for less than a byte.
    """
    found = WORD.fullmatch(word.strip())
    if found:
        number, unit, binary = found.groups()
        power = " kmgt".index(unit.lower()) if unit else 0
        if size := int(float(number) * (1024 if binary else 1000) ** power):
            return size
    raise UserError(f"{where}: {word!r} is no size; expected such as 100GB, 500M or 1.5TiB")
