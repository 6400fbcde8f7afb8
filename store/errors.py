"""Errors of stores, and the words for what to do about them."""

from __future__ import annotations

from support.errors import UserError


class StoreError(UserError):
    """A feature store is missing, unfinished, damaged, of another version, or badly filled."""


VERIFY = "run `feature-store verify`"
"""What to do where a store can be opened, but something in it cannot be read."""
REPAIR = "run `feature-store repair`, which mends it or says what else to do"
"""What to do where a store cannot even be opened."""


def without_remedy(message: object) -> str:
    """A message without the advice at its end, for places where the advice would not help."""
    text = str(message)
    for remedy in (VERIFY, REPAIR, "the store is damaged"):
        text = text.removesuffix(remedy).rstrip("; :")
    return text
