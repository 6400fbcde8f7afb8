"""Read a whole store, and compare it with its manifest and with the rules of FORMAT.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from store.containers.interface import Flaw
from store.containers.network import fetches
from store.errors import StoreError, without_remedy
from store.extras.mixed_vocab import GROUP as MIXED_VOCAB
from store.extras.mixed_vocab import MixedVocab
from store.extras.word_counts import GROUP as WORD_COUNTS
from store.extras.word_counts import WordCounts
from store.format.index import GROUP as INDEX
from store.format.index import IndexedParts
from store.format.layout import PartShapes, groups_above, part_number
from store.format.manifest import Entry, Part
from store.read.part import checksum
from store.read.store import FeatureStore
from store.tools.laws import check_part, parts_with_other_tokens
from store.tools.report import Problem, Report
from store.tools.salvage import Opened, open_damaged

MAX_THREADS = 16
TOKENIZER, SETTINGS = "tokenizer.json", ("config.json", "tokenizer_config.json")
OTHERS: dict[str, Callable[[FeatureStore], object]] = {
    MIXED_VOCAB: MixedVocab.stored,
    WORD_COUNTS: WordCounts.stored,
}
Progress = Callable[[list[Any], str], Iterable[Any]]


def entries(store: FeatureStore) -> Iterator[tuple[str, Entry]]:
    """Every array of a store with its path and manifest entry, the manifest itself left out."""
    yield from store.manifest.arrays.items()
    yield from index_entries(store)
    for part in store.manifest.parts:
        for name, entry in part.arrays.items():
            yield f"parts/{part.number}/{name}", entry


def index_entries(store: FeatureStore) -> Iterator[tuple[str, Entry]]:
    """Every array of the index of parts, if the store has one."""
    if isinstance(store.manifest.parts, IndexedParts):
        for name, entry in store.manifest.parts.entries.items():
            yield f"{INDEX}/{name}", entry


def verify(
    path: str | Path,
    storage_options: dict[str, Any] | None = None,
    progress: Progress = lambda items, unit: items,
    allow_partial: bool = False,
) -> Report:
    """Check every array of a store against the manifest, then the meaning of every sound part.

    Each array is read once, in threads: decoding and SHA-256 release the GIL. A thread holds
    some 16 MB of an array, or the tokens of a part. `progress(items, unit)` wraps a list, as tqdm
    does. `allow_partial` checks the published parts of an unfinished store. A store that no reader
    opens is checked as far as what is left of it tells what it was. Raises StoreError if that is
    too little, or if the store is unfinished; everything else is a problem in the report.
    """
    return verify_opened(open_damaged(path, storage_options, allow_partial), progress)


def verify_opened(opened: Opened, progress: Progress = lambda items, unit: items) -> Report:
    """Check a store that may be damaged as `verify` does, and close it."""
    report = verify_store(opened.store, progress)
    if opened.found:  # which tell of its root and manifest already
        rest = [problem for problem in report.found if problem.group not in ("", "manifest")]
        report.found = opened.found + rest
        if opened.attributes["version"] > 1:  # its index is as lost as its manifest
            report.odd = [flaw for flaw in report.odd if flaw.path.split("/")[0] != INDEX]
    return report


def verify_store(store: FeatureStore, progress: Progress = lambda items, unit: items) -> Report:
    """Check an open store as `verify` does, and close it."""
    report = Report(len(store.manifest.parts))
    report.found += _altered_parts(store)
    absent = report.damaged_parts()
    names = [name for name, _ in entries(store)]
    listed = [item for item in entries(store) if part_of(item[0]) not in absent]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        try:
            flaws = threads.submit(_flaws, store, names)
            read = threads.map(lambda item: _checked(store, *item), listed)
            for (name, _), (problem, size) in zip(progress(listed, "array"), read, strict=True):
                report.arrays, report.bytes = report.arrays + 1, report.bytes + size
                if problem:
                    line = f"{_place(name)} {problem}"
                    report.found.append(_problem(line, name, is_array=True))
            report.found += _check_groups(store, [name for name, _ in listed])
            _add(report, flaws.result(), set(names), absent)
            damaged = report.damaged_parts()
            places = [i for i, p in enumerate(store.manifest.parts) if p.number not in damaged]
            report.found += [*_others(store, report), *_broken_calibration(store, report)]
            meant = threads.map(lambda place: _check_meaning(store, place), places)
            for _, found in zip(progress(places, "part"), meant, strict=True):
                report.found += found
            report.found += _broken_files(store, report)
        except BaseException:  # Ctrl-C, for one, must not wait for what is queued
            threads.shutdown(cancel_futures=True)
            raise
    store.close()
    return report


def part_of(path: str) -> int | None:
    """The number of the part that a path lies in; None outside the parts."""
    top, _, rest = path.partition("/")
    return part_number(rest.partition("/")[0]) if top == "parts" else None


def _place(name: str) -> str:
    segments = name.split("/")
    if segments[0] == "parts":
        return f"part {segments[1]}: array {'/'.join(segments[2:])}"
    return f"array {name}"


def _checked(store: FeatureStore, name: str, entry: Entry) -> tuple[str | None, int]:
    """The problem of an array (None if it is sound), and how many of its bytes were read."""
    for _ in fetches(store.source.remote):
        problem, size = _check_array(store, name, entry)
        if problem is None:
            break
    return problem, size


def _check_array(store: FeatureStore, name: str, entry: Entry) -> tuple[str | None, int]:
    size = 0
    try:
        array = store.source.array(name)
        if array.shape != entry.shape or array.dtype.name != entry.dtype:
            is_now, was = (
                f"{array.dtype.name}{list(array.shape)}",
                f"{entry.dtype}{list(entry.shape)}",
            )
            return f"is {is_now}, not {was}", size
        found = checksum(array)
        size = array.dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))
        if found != entry.sha256:
            return "does not match its checksum", size
        if entry.fingerprint and entry.fingerprint != store.source.fingerprint(name):
            return "has an altered zarr.json", size
        if what := store.source.unlawful(name):
            return f"is stored with {what} (FORMAT.md, section 3)", size
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError):  # which is no damage
            raise
        return f"cannot be read{_chunks(store, name)}: {error}", size
    return None, size


def _chunks(store: FeatureStore, name: str) -> str:
    try:
        bad = store.source.damaged_chunks(name)
    except Exception:  # metadata that cannot be opened was reported already
        return ""
    return f" (chunk {', '.join(map(str, bad[:8]))})" if bad else ""


def _altered_parts(store: FeatureStore) -> Iterator[Problem]:
    """A problem for each part that is gone, or whose attribute is not its entry: the manifest has
    the entry, too."""
    shapes, there = PartShapes(store.features), set[str]()
    for _ in fetches(store.source.remote):  # a listing may be altered on the way as well
        if any(str(part.number) not in there for part in store.manifest.parts):
            try:
                there.update(store.source.members("parts"))
            except StoreError as error:
                yield Problem(f"group parts: {without_remedy(error)}", group="parts")
                break
    for part in store.manifest.parts:
        group = f"parts/{part.number}"
        if str(part.number) not in there:
            yield Problem(f"part {part.number}: cannot be opened: it is missing", part.number)
            continue
        try:
            if any(_describes(store, part, shapes) for _ in fetches(store.source.remote)):
                continue
            line = f"part {part.number}: its attributes were altered"
        except StoreError as error:
            line = f"part {part.number}: its attributes cannot be read: {error}"
        yield Problem(line, part.number, group=group)


def _describes(store: FeatureStore, part: Part, shapes: PartShapes) -> bool:
    """Whether the attribute of a part is its entry."""
    found = store.source.attributes(f"parts/{part.number}")
    return found.keys() == {"part"} and _own_entry(found["part"], shapes) == part


def _own_entry(value: object, shapes: PartShapes) -> Part | None:
    """The part as its attribute `part` describes it, None if it does not; unknown keys are
    ignored, as in the manifest."""
    try:
        return Part.from_json(value, shapes, "")
    except StoreError:
        return None


def _check_groups(store: FeatureStore, names: list[str]) -> Iterator[Problem]:
    """A problem for each group but those of the parts and the root that has attributes."""
    groups = {"parts", *(group for name in names for group in groups_above(name))}
    for group in sorted(groups - {f"parts/{part.number}" for part in store.manifest.parts}):
        try:
            if all(store.source.attributes(group) for _ in fetches(store.source.remote)):
                yield Problem(
                    f"group {group}: its attributes were altered", part_of(group), group=group
                )
        except StoreError as error:
            yield Problem(f"group {group}: {error}", part_of(group), group=group)


def _flaws(store: FeatureStore, names: list[str]) -> list[Flaw]:
    """What the container alone can tell: missing, altered and strange files.

    An unfinished store is not asked: its files come and go."""
    if store.meta["state"] != "sealed":
        return []
    return store.source.flaws([*names, "manifest"])


def _add(report: Report, flaws: list[Flaw], arrays: set[str], absent: set[int]) -> None:
    """Add flaws of the container to what was found. A part that is gone was told already; and so
    were lost arrays, and groups whose metadata cannot be read."""
    told = {problem.group for problem in report.found}
    for flaw in flaws:
        line, path, part = flaw.line, flaw.path, part_of(flaw.path)
        if flaw.stranger:
            report.odd.append(flaw)
        elif part in absent or path in told:
            continue
        else:
            report.found.append(_problem(line, path, path in arrays))


def _problem(line: str, path: str, is_array: bool) -> Problem:
    """What is wrong with an array or a group. What the index says is known otherwise, too."""
    if is_array and not path.startswith(f"{INDEX}/"):
        return Problem(line, part_of(path), array=path)
    return Problem(line, part_of(path), group=path)


def _broken_files(store: FeatureStore, report: Report) -> Iterator[Problem]:
    """A problem for each of the teacher's files that is none, and for each part that is sound so
    far and of which the tokenizer gives other tokens."""
    lost, held = report.lost_outside(), store.teacher_files()
    for name in SETTINGS:
        if name in held and f"teacher/files/{name}" not in lost:
            try:
                store.teacher_settings(name)
            except StoreError as error:
                yield Problem(without_remedy(error))
    if TOKENIZER not in held or f"teacher/files/{TOKENIZER}" in lost:
        return
    damaged, parts = report.damaged_parts(), store.manifest.parts
    places = [place for place, part in enumerate(parts) if part.number not in damaged]
    try:
        for place, line in parts_with_other_tokens(store, places):
            yield Problem(line, parts[place].number)
    except StoreError as error:
        yield Problem(str(error))


def _others(store: FeatureStore, report: Report) -> list[Problem]:
    """Problems of what only some stores hold outside their parts; arrays that have a problem
    already are not read again."""
    found, lost = [], report.lost_outside()
    for group, read in OTHERS.items():
        if not any(array.startswith(f"{group}/") for array in lost):
            try:
                read(store)
            except StoreError as error:
                found.append(Problem(without_remedy(error)))
    return found


def _broken_calibration(store: FeatureStore, report: Report) -> Iterator[Problem]:
    """A problem for each calibration by which no hidden state can be decoded."""
    lost = report.lost_outside()
    for name in store.features.hidden:
        if not any(array.startswith(f"calibration/hidden/{name}/") for array in lost):
            try:
                mean, deviation = store.read_calibration(name)
            except StoreError as error:
                yield Problem(without_remedy(error))
                continue
            if not (np.isfinite(mean) & np.isfinite(deviation) & (deviation > 0)).all():
                yield Problem(f"calibration of {name} is not finite with deviations over 0")


def _check_meaning(store: FeatureStore, place: int) -> list[Problem]:
    number = store.manifest.parts[place].number
    try:
        lines = check_part(store.part(place))
    except StoreError as error:
        lines = [str(error)]
    return [Problem(line, number) for line in lines]
