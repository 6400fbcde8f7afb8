"""Finish a store whose parts were written by several processes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from teachonce.store.containers.paths import local_staging_of
from teachonce.store.errors import StoreError, missing
from teachonce.store.format.identity import making_command
from teachonce.store.read.manifests import listed_outside, missing_outside
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.writer import StoreWriter
from teachonce.support.console import counted
from teachonce.support.errors import UserError

SHOWN = 5  # numbers of parts in a line


def seal(path: str | Path) -> bool:
    """Write the manifest of a store whose parts are all published. Return whether it was written.

    A finished store is left unchanged. Raises UserError if the path is not a store, if another
    process fills its queue or seals it, or if a part or array is missing; StoreError if a part is
    damaged.
    """
    staging = local_staging_of(path)
    if not staging.path.exists():
        raise UserError(missing(path))
    if StoreWriter.peek(path, "sealed"):
        return False
    with closing(staging.lease()) as lease:
        if StoreWriter.peek(path, "sealed"):  # by another process, before this one had the lease
            return False
        _check_complete(path)
        staging.clear()  # temporary files of processes that were killed or lost their lease
        StoreWriter(staging, StoreWriter.unfinished(staging), lease).seal()
        # Last: only the queue has the number of parts, which a later call would need.
        PartQueue(path).remove()
    return True


def missing_parts(path: str | Path) -> set[int] | None:
    """Return the numbers of the parts that are neither published nor in the queue; None while the
    queue is still being filled."""
    queue = PartQueue(path)
    if (counts := queue.ended()) is None:
        return None
    queued = queue.numbers()  # first: a part leaves the queue when published
    return set(range(counts["parts"])) - queued - local_staging_of(path).published()


def is_complete(path: str | Path) -> bool:
    """Return whether every part of an unfinished store is published."""
    counts = PartQueue(path).ended()
    return counts is not None and local_staging_of(path).published() >= set(range(counts["parts"]))


def _check_complete(path: str | Path) -> None:
    """Raise UserError, with the remedy, if anything of an unfinished store is missing."""
    staging, counts = local_staging_of(path), PartQueue(path).ended()
    attributes = StoreWriter.unfinished(staging)
    again = f"repeat the command that makes it ({making_command(attributes['identity'])})"
    if counts is None:
        raise UserError(
            f"{path}: the dump has not yet read its corpus to the end; {again}, which finishes it"
        )
    absent = sorted(set(range(counts["parts"])) - staging.published())
    if absent:
        raise UserError(
            f"{path}: {counted(len(absent), 'part')} of {counts['parts']:,} not published yet"
            f" ({_listed(absent)}); wait for the processes that write them, or {again}"
        )
    with closing(staging.source()) as source:
        if outside := missing_outside(source, listed_outside(source)):
            raise StoreError(f"{path}: lacks {', '.join(sorted(outside))}; {again} without --shard")


def _listed(numbers: Iterable[int]) -> str:
    names = [str(number) for number in numbers]
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
