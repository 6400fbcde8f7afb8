"""Errors of stores, and the remedies that their messages end with."""

from __future__ import annotations

import os
import re
import shlex

from teachonce.support.errors import UserError, suggest_path


class StoreError(UserError):
    """Raised if a store is missing, unfinished, damaged or of another version, or has wrong values.

    A message starts with the path of the store and a colon. The path also replaces STORE in the
    remedies of this module (`VERIFY`, `REPAIR`), so that their commands can be copied.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_with_path, args))


class MissingStore(StoreError):
    """Raised if there is no store at an address, so that nothing there could be repaired."""


class Unreachable(UserError):
    """Raised if a store, or a file in it, could not be fetched over a network.

    It is not a StoreError, because code that handles StoreError as damage must not treat a failed
    request as damage.
    """


NO_PATH = "STORE"
"""Placeholder, in remedies, for the path of a store that is not known."""
VERIFY = "run `feature-store verify STORE`"
"""Remedy if a store can be opened but something in it cannot be read."""
REPAIR = "run `feature-store repair STORE`, which repairs it or prints what else to do"
"""Remedy if a store cannot be opened."""
NO_NUMBERS = (
    "no teacher gives such values: make the store again, or leave that feature out;"
    " `feature-store verify STORE` lists all of them"
)
"""Remedy if the values of a store break a law (FORMAT.md, section 6)."""
MISSING = (
    "check the name, or run the command that makes it (`teacher-dump`, `feature-store merge` or"
    " `feature-store convert`)"
)
NO_STORE = (
    "give the .zarr folder or .h5 file that teacher-dump wrote; if this was one, run"
    " `feature-store repair STORE`"
)
NO_QUEUE = (
    "several processes share a dump through a folder next to the store, and a bucket has no"
    " folders: dump to a disk that all processes see and copy the store with `feature-store"
    " convert`, or use one process, without --shard and --ray"
)


def missing(path: object) -> str:
    """Return the message for a path without a file or folder."""
    return f"{path}: no such file or folder; {suggest_path(str(path))}{MISSING}"


def command(name: str, path: object) -> str:
    """Return a command of `feature-store` for a store, in backquotes, ready to type."""
    return f"`feature-store {name} {shlex.quote(str(path))}`"


PLACE = re.compile(r"`feature-store (verify|repair) STORE`")
REMEDIES = re.compile(
    "({})$".format(
        "|".join(
            re.escape(remedy).replace("STORE", "[^`]+")
            for remedy in (VERIFY, REPAIR, NO_STORE, NO_NUMBERS, "the store is damaged")
        )
    )
)


def _with_path(message: object) -> str:
    """Insert the path with which a message starts into the commands of the message's remedy."""
    text = str(message)
    if not PLACE.search(text):
        return text
    ends = [match.start() for match in re.finditer(": ", text)]  # a path may have a colon, too
    paths = [text[:end] for end in ends]
    path = next(filter(os.path.exists, paths), paths[0] if paths else NO_PATH)
    path = re.sub(r"\.parts/\d+\.h5$", "", path)  # a part of an unfinished HDF5 store
    return PLACE.sub(lambda match: command(match[1], path), text)


def without_remedy(message: object) -> str:
    """Return a message without a remedy of this module at its end, for callers that add another."""
    text = str(message)
    while (short := REMEDIES.sub("", text).rstrip("; :")) != text:
        text = short
    return text
