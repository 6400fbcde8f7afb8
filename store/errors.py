"""Errors of stores, and the words for what to do about them."""

from __future__ import annotations

from teachonce.support.errors import UserError


class StoreError(UserError):
    """A feature store is missing, unfinished, damaged, of another version, or badly filled."""


class Unreachable(UserError):
    """A store, or a file of it, could not be fetched over a network.

    It is no StoreError: what takes that for damage must not see it, as nothing is known about what
    was not fetched.
    """


VERIFY = "run `feature-store verify`"
"""What to do where a store can be opened, but something in it cannot be read."""
REPAIR = "run `feature-store repair`, which mends it or says what else to do"
"""What to do where a store cannot even be opened."""
NO_NUMBERS = (
    "no teacher gives such values: make the store again, or leave that feature out;"
    " `feature-store verify` lists all of them"
)
"""What to do where the values of a store break a law."""
MISSING = (
    "no such file or folder; check the name, or type the command that makes it (`teacher-dump`,"
    " `feature-store merge` or `feature-store convert`)"
)
NO_STORE = (
    "give the .zarr folder or .h5 file that teacher-dump wrote; if this was one, run `feature-store"
    " repair`"
)
NO_QUEUE = (
    "processes that make one store together find its parts in a folder beside it, which a bucket"
    " does not have: make the store on a disk that all of them see and copy it with `feature-store"
    " convert`, or make it by one process, without --shard and --ray"
)


def without_remedy(message: object) -> str:
    """A message without the advice at its end, for places where the advice would not help."""
    text = str(message)
    for remedy in (VERIFY, REPAIR, NO_STORE, NO_NUMBERS, "the store is damaged"):
        text = text.removesuffix(remedy).rstrip("; :")
    return text
