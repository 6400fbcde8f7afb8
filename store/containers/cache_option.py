"""Parse `disk:DIR,SIZE`, the value of `--cache` for a cache on a disk, without importing anything
else."""

from __future__ import annotations

import re
from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.support.parsing import DIGITS

PREFIX = "disk:"
EXPECTED = "disk:DIR,SIZE, such as disk:/scratch/cache,100GB"
SIZE = re.compile(rf"({DIGITS}(?:\.[0-9]+)?) ?(?:([kmgt])(i)?)?b?", re.IGNORECASE | re.ASCII)


def is_disk_cache(word: str) -> bool:
    """Return whether a value of --cache names a cache on a disk."""
    return word.startswith(PREFIX)


def parse_disk_cache(word: str) -> tuple[Path, int]:
    """Parse `disk:DIR,SIZE` into folder and bytes. Raises UserError for any other value."""
    # The last comma separates, because the name of a folder may have a comma, too.
    folder, _, size = word.removeprefix(PREFIX).rpartition(",")
    if not is_disk_cache(word) or not folder:
        raise UserError(f"--cache {word}: expected {EXPECTED}")
    return Path(folder).expanduser(), parse_size(size, f"--cache {word}")


def parse_size(word: str, where: str) -> int:
    """Parse a size such as 100GB, 500M or 1.5 GiB into bytes: k, M, G and T are powers of 1,000;
    with an `i`, of 1,024.

    Raises UserError, whose message starts with `where`, for any other text and for less than a
    byte.
    """
    match = SIZE.fullmatch(word.strip())
    if match:
        number, unit, binary = match.groups()
        power = " kmgt".index(unit.lower()) if unit else 0
        if size := int(float(number) * (1024 if binary else 1000) ** power):
            return size
    raise UserError(
        f"{where}: {word!r} is not a size; expected a number and a unit, such as 100GB, 500M or"
        " 1.5TiB"
    )
