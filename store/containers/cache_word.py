"""The words that name the folder of a cache, `disk:DIR,SIZE` and `shared:DIR`, read before anything
is loaded."""

from __future__ import annotations

from pathlib import Path

from teachonce.support.errors import UserError
from teachonce.support.sizes import parse_size

PREFIX = "disk:"
EXPECTED = "disk:DIR,SIZE, such as disk:/scratch/cache,100GB"
SHARED = "shared:"


def is_disk_cache(word: str) -> bool:
    """Whether a word of --cache names a cache on a disk."""
    return word.startswith(PREFIX)


def parse_disk_cache(word: str) -> tuple[Path, int]:
    """Read folder and bytes of `disk:DIR,SIZE`. Raises UserError for any other word."""
    folder, _, size = word.removeprefix(PREFIX).rpartition(",")
    if not is_disk_cache(word) or not folder:
        raise UserError(f"--cache {word}: expected {EXPECTED}")
    return Path(folder).expanduser(), parse_size(size, f"--cache {word}")


def shared_folder(word: str) -> Path | None:
    """Read the folder of `shared:DIR`; None for another word. Raises UserError if it has none."""
    if not word.startswith(SHARED):
        return None
    if word == SHARED:
        raise UserError(f"--cache {word}: expected {SHARED}DIR, such as {SHARED}/dev/shm/sweep")
    return Path(word.removeprefix(SHARED)).expanduser()
