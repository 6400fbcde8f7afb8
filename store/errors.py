"""Errors of stores, and the remedies that their messages end with."""

from __future__ import annotations

from teachonce.support.errors import UserError


class StoreError(UserError):
    """A feature store is missing, unfinished, damaged or of another version, or holds wrong
    values."""


class Unreachable(UserError):
    """A store, or a file in it, could not be fetched over a network.

    Not a StoreError: code that handles StoreError as damage must not treat a failed request so.
    """


VERIFY = "run `feature-store verify`"
"""Remedy if a store can be opened but something in it cannot be read."""
REPAIR = "run `feature-store repair`, which mends it or says what else to do"
"""Remedy if a store cannot be opened."""
NO_NUMBERS = (
    "no teacher gives such values: make the store again, or leave that feature out;"
    " `feature-store verify` lists all of them"
)
"""Remedy if the values of a store break a law (FORMAT.md, section 6)."""
MISSING = (
    "no such file or folder; check the name, or type the command that makes it (`teacher-dump`,"
    " `feature-store merge` or `feature-store convert`)"
)
NO_STORE = (
    "give the .zarr folder or .h5 file that teacher-dump wrote; if this was one, run `feature-store"
    " repair`"
)
NO_QUEUE = (
    "several processes share a dump by a folder next to the store, and a bucket has no folders:"
    " dump to a disk that all processes see and copy the store with `feature-store convert`, or use"
    " one process, without --shard and --ray"
)


def without_remedy(message: object) -> str:
    """Return a message without the remedy at its end, for callers that add another."""
    text = str(message)
    for remedy in (VERIFY, REPAIR, NO_STORE, NO_NUMBERS, "the store is damaged"):
        text = text.removesuffix(remedy).rstrip("; :")
    return text
