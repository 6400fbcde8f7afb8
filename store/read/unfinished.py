"""Read an unfinished store: the entries of its published parts, and arrays outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from teachonce.store.containers.interface import Source
from teachonce.store.containers.network import surely
from teachonce.store.containers.paths import queue_of
from teachonce.store.errors import StoreError, without_remedy
from teachonce.store.format.features import Calibration, Features
from teachonce.store.format.layout import PartShapes, part_number
from teachonce.store.format.manifest import (
    ATTRIBUTES,
    DAMAGED,
    Manifest,
    Part,
    check_root,
    digest,
    opening,
    read_entries,
)
from teachonce.support.arrays import Array
from teachonce.support.console import counted, takes_option


def made_by(identity: Mapping[str, Any]) -> str:
    """The command that made a store, as far as its identity tells: a copy has that of its source,
    and where it is lost it is empty."""
    if not identity:
        return "`teacher-dump`, `feature-store merge` or `feature-store convert`, as it was typed"
    corpus = identity.get("corpus")
    told = corpus if isinstance(corpus, Mapping) else {}
    if "forgotten" in told:
        made = (
            "`feature-store forget` with the same documents where that was stopped; what was lost"
            " since no command makes again: restore the store from a copy"
        )
    elif "grown_from" in told:
        made = "`teacher-dump --grow-from` with the same arguments"
    elif "merged" in told:
        made = "`feature-store merge` with the same stores"
    elif "mixed_vocab" in identity:
        made = "`teacher-dump mixed-vocab` with the same arguments"
    else:
        made = "`teacher-dump` with the same arguments"
    return f"{made}; of a copy, `feature-store convert` from the same store"


def unsealed_manifest(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> Manifest:
    """Make the manifest of an unfinished store from its published parts. Raises StoreError."""
    manifest, unreadable = readable_manifest(source, attributes, features)
    for number, error in unreadable.items():
        raise unreadable_part(source, number, error) from error
    return manifest


def unreadable_part(source: Source, number: int, error: StoreError) -> StoreError:
    """The error for a part that keeps an unfinished store from going on."""
    return StoreError(
        f"{without_remedy(error)}; run `feature-store repair`, which moves part"
        f" {number} aside, and type the command again: it makes this part anew and goes on"
    )


def _own_entry(source: Source, number: int, shapes: PartShapes) -> Part:
    value = source.attributes(f"parts/{number}").get("part")
    part = Part.from_json(value, shapes, source.path)
    if part.number != number:
        raise StoreError(f"{source.path}: part {number} says it is part {part.number}")
    return part


def published_part(source: Source, number: int, features: Features) -> Part:
    """The entry of a part of an unfinished store. Raises StoreError if it cannot be read."""
    return next(_entries_of(source, [number], features))


def published_parts(source: Source, features: Features) -> Iterator[Part]:
    """The entries of all parts of an unfinished store, one after another, ascending. Raises
    StoreError if one cannot be read."""
    return _entries_of(source, part_numbers(source), features)


def _entries_of(source: Source, numbers: Iterable[int], features: Features) -> Iterator[Part]:
    shapes = PartShapes(features)
    for number in numbers:
        try:
            part = _own_entry(source, number, shapes)
        except StoreError as error:
            raise unreadable_part(source, number, error) from error
        yield part


def part_numbers(source: Source) -> list[int]:
    """Numbers of the parts of an unfinished store, ascending."""
    numbers = (part_number(name) for name in source.members("parts"))
    return sorted(number for number in numbers if number is not None)


def unfinished(source: Source) -> StoreError:
    """The error that refuses an unfinished store.

    One process writes the parts in order, so one that is missing before another was there and is
    gone.
    """
    there = part_numbers(source)
    in_order = source.remote or not queue_of(source.path).exists()
    gone = there[-1] + 1 - len(there) if there and in_order else 0
    parts = counted(len(there), "part") + (f" there, {gone:,} dropped or lost" if gone else "")
    try:
        made = made_by(source.attributes().get("identity") or {})
    except StoreError:
        made = made_by({})
    ways = {True: "--allow-partial", None: "open_store(..., allow_partial=True)"}
    way = ways.get(takes_option("allow_partial"))
    return StoreError(
        f"{source.path}: is not finished ({parts}); let the command that makes it end, or type it"
        f" again ({made}), which makes the rest"
        + (f"; or take the parts that are there with {way}" if way else "")
    )


def readable_manifest(
    source: Source, attributes: Mapping[str, Any], features: Features
) -> tuple[Manifest, dict[int, StoreError]]:
    """Make a manifest from the entries that parts hold themselves; parts whose entries cannot be
    read are returned with their errors."""
    parts, unreadable, shapes = [], {}, PartShapes(features)
    for number in part_numbers(source):
        try:
            parts.append(_own_entry(source, number, shapes))
        except StoreError as error:
            unreadable[number] = error
    arrays = read_entries(attributes.get("arrays"), source.path)
    kept = {key: attributes[key] for key in ATTRIBUTES}
    return Manifest(kept, arrays, parts), unreadable


def absent_outside(source: Source) -> set[str]:
    """Names of the arrays outside the parts that a store lists and lacks: repair has moved them
    aside, or they were lost."""
    listed, there = read_entries(source.attributes().get("arrays"), source.path), {}
    for group in {name.rpartition("/")[0] for name in listed}:
        there[group] = set(source.members(group))
    return {
        name for name in listed if name.rpartition("/")[2] not in there[name.rpartition("/")[0]]
    }


def read_calibration(source: Source) -> Calibration | None:
    """Read (mean, deviation) of every hidden state of an unfinished store; None if it lacks one.

    Raises StoreError if a checksum differs.
    """
    if any(name.startswith("calibration/hidden/") for name in absent_outside(source)):
        return None
    read = read_outside(source)
    return {
        name: (
            read(f"calibration/hidden/{name}/mean"),
            read(f"calibration/hidden/{name}/deviation"),
        )
        for name in check_root(source.attributes(), source.path).hidden
    }


def read_outside(source: Source) -> Callable[[str], Array]:
    """Return a reader of the arrays outside the parts of an unfinished store; it raises StoreError
    if a checksum differs."""
    entries = read_entries(source.attributes().get("arrays"), source.path)

    def read(name: str) -> Array:
        with opening():
            array = source.array(name)
            values = array.read(0, array.shape[0])
        if name not in entries or digest(values) != entries[name].sha256:
            raise StoreError(f"{source.path}: {name} does not match its checksum; {DAMAGED}")
        return values

    return lambda name: surely(source.remote, lambda: read(name))
