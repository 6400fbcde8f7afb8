"""Read a whole store and compare it with its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from store.errors import StoreError
from store.manifest import Entry
from store.reader import FeatureStore, open_store

SLICE_BYTES = 2**25


@dataclass
class Report:
    """What `verify` read and found; each problem names the part, the array, and the chunk."""

    parts: int
    arrays: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def entries(store: FeatureStore) -> Iterator[tuple[str, Entry]]:
    """Every array of a store with its path and manifest entry, the manifest itself left out."""
    yield from store.manifest.arrays.items()
    for part in store.manifest.parts:
        for name, entry in part.arrays.items():
            yield f"parts/{part.number}/{name}", entry


def _groups(paths: list[str]) -> set[str]:
    groups = {"parts"}
    for path in paths:
        segments = path.split("/")
        groups.update("/".join(segments[:depth]) for depth in range(1, len(segments)))
    return groups


def _check_array(store: FeatureStore, name: str, entry: Entry, report: Report) -> str | None:
    array = store.source.array(name)
    if array.shape != entry.shape or array.dtype.name != entry.dtype:
        return f"is {array.dtype.name}{list(array.shape)}, not {entry.dtype}{list(entry.shape)}"
    row = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    step = max(4096, SLICE_BYTES // max(1, row) // 4096 * 4096)
    checksum = hashlib.sha256()
    for begin in range(0, array.shape[0], step):
        rows = array.read(begin, min(begin + step, array.shape[0]))
        checksum.update(np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes())
        report.bytes += rows.nbytes
    if checksum.hexdigest() != entry.sha256:
        return "does not match its checksum"
    if entry.fingerprint != store.source.fingerprint(name) and entry.fingerprint:
        return "has an altered zarr.json"
    return None


def _chunks(store: FeatureStore, name: str) -> str:
    try:
        bad = store.source.damaged_chunks(name)
    except Exception:  # metadata that cannot be opened was reported already
        return ""
    return f" (chunk {', '.join(map(str, bad[:8]))})" if bad else ""


def verify(
    path: str | Path,
    storage_options: dict[str, Any] | None = None,
    progress: Callable[[list[Any]], Any] = iter,
) -> Report:
    """Read every array of a sealed store once and check it against the manifest.

    `progress` wraps the list of arrays, as tqdm does. Raises StoreError if the store cannot be
    opened at all (see `open_store`); everything else is a problem in the report.
    """
    store = open_store(path, storage_options=storage_options)
    report, listed = Report(len(store.manifest.parts)), list(entries(store))
    names = [name for name, _ in listed]
    for name, entry in progress(listed):
        try:
            problem = _check_array(store, name, entry, report)
        except StoreError as error:
            problem = f"cannot be read{_chunks(store, name)}: {error}"
        if problem:
            report.problems.append(f"{_place(name)} {problem}")
        report.arrays += 1
    held = {f"parts/{part.number}": {"part": part.to_json()} for part in store.manifest.parts}
    for group in sorted(_groups(names)):
        try:
            if store.source.attributes(group) != held.get(group, {}):
                report.problems.append(f"group {group}: its attributes were altered")
        except StoreError as error:
            report.problems.append(f"group {group}: {error}")
    if not report.problems:
        for place in range(len(store.manifest.parts)):
            _check_starts(store, place, report)
    report.problems += store.source.damage([*names, "manifest"])
    store.close()
    return report


def _place(name: str) -> str:
    segments = name.split("/")
    if segments[0] == "parts":
        return f"part {segments[1]}: array {'/'.join(segments[2:])}"
    return f"array {name}"


def _check_starts(store: FeatureStore, place: int, report: Report) -> None:
    """What opening a part would refuse, although the bytes are those that were written."""
    part = store.part(place)
    try:
        part.texts(0, part.part.counts.sequences)
        assert len(part.square_start)
    except StoreError as error:
        report.problems.append(str(error))
