"""Read an unfinished store: the entries of its published parts, and arrays outside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from store.containers.interface import Source
from store.errors import StoreError, without_remedy
from store.format.features import Calibration, Features
from store.format.layout import PartShapes
from store.format.manifest import (
    ATTRIBUTES,
    DAMAGED,
    Manifest,
    Part,
    check_root,
    digest,
    read_entries,
)
from support.arrays import Array
from support.console import counted


def _place(path: str, part: int) -> str:
    """The path of a part of an unfinished store, for a message."""
    return f"{path}.parts/{part}.h5" if path.endswith(".h5") else f"{path}/parts/{part}"


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
        f"{without_remedy(error)}; remove {_place(source.path, number)} and type the "
        "teacher-dump command again: it writes this part anew and goes on"
    )


def _own_entry(source: Source, number: int, shapes: PartShapes) -> Part:
    value = source.attributes(f"parts/{number}").get("part")
    part = Part.from_json(value, shapes, source.path)
    if part.number != number:
        raise StoreError(f"{source.path}: part {number} says it is part {part.number}")
    return part


def published_part(source: Source, number: int, features: Features) -> Part:
    """The entry of a part of an unfinished store. Raises StoreError if it cannot be read."""
    try:
        return _own_entry(source, number, PartShapes(features))
    except StoreError as error:
        raise unreadable_part(source, number, error) from error


def part_numbers(source: Source) -> list[int]:
    """Numbers of the parts of an unfinished store, ascending."""
    return sorted(int(name) for name in source.members("parts") if name.isdecimal())


def unfinished(source: Source) -> StoreError:
    """The error that refuses an unfinished store.

    Parts are written in order, so a part that is missing before another one was there and is gone.
    """
    there = part_numbers(source)
    gone = there[-1] + 1 - len(there) if there else 0
    parts = counted(len(there), "part") + (f" there, {gone:,} dropped or lost" if gone else "")
    return StoreError(
        f"{source.path}: is not finished ({parts}); let the command that makes it end, or type it"
        " again (teacher-dump with the same arguments), which makes the rest; or take the parts"
        " that are there with --allow-partial, open_store(..., allow_partial=True)"
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


def read_calibration(source: Source) -> Calibration:
    """Read (mean, deviation) of every hidden state of an unfinished store. Raises StoreError if a
    checksum differs."""
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
        array = source.array(name)
        values = array.read(0, array.shape[0])
        if name not in entries or digest(values) != entries[name].sha256:
            raise StoreError(f"{source.path}: {name} does not match its checksum; {DAMAGED}")
        return values

    return read
