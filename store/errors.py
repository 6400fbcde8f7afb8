"""What is wrong with a store, and what to do about it."""

from __future__ import annotations

from support.errors import UserError


class StoreError(UserError):
    """A feature store that is missing, unfinished, damaged, of another version, or badly fed."""


VERIFY = "run `feature-store verify`"
"""What to do where a store can be opened, but something in it cannot be read."""
RESTORE = "restore it from a copy, or remove it and dump again with the same arguments"
"""What to do where a store cannot even be opened."""


def without_remedy(message: object) -> str:
    """A message (or error) without what it says to do at its end, where that is of no use."""
    text = str(message)
    for remedy in (VERIFY, RESTORE, "the store is damaged"):
        text = text.removesuffix(remedy).rstrip("; :")
    return text
