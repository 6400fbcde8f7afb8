"""Read a whole store, and compare it with its manifest and with the rules of FORMAT.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from store.errors import StoreError, without_remedy
from store.extras.mixed_vocab import GROUP as MIXED_VOCAB
from store.extras.mixed_vocab import MixedVocab
from store.extras.word_counts import GROUP as WORD_COUNTS
from store.extras.word_counts import WordCounts
from store.format.layout import PartShapes
from store.format.manifest import Entry, Part
from store.read.part import checksum
from store.read.store import FeatureStore, open_store
from store.tools.laws import check_part

MAX_THREADS = 16
OTHERS: dict[str, Callable[[FeatureStore], object]] = {
    MIXED_VOCAB: MixedVocab.stored,
    WORD_COUNTS: WordCounts.stored,
}
Progress = Callable[[list[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, as a line for a person; `part` is the number of its part, None
    outside the parts."""

    line: str
    part: int | None = None


@dataclass
class Report:
    """What `verify` read, and the problems that it found; each names part, array and chunk."""

    parts: int
    arrays: int = 0
    bytes: int = 0
    found: list[Problem] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [problem.line for problem in self.found]

    def damaged_parts(self) -> set[int]:
        """Numbers of the parts with a problem."""
        return {problem.part for problem in self.found if problem.part is not None}


def entries(store: FeatureStore) -> Iterator[tuple[str, Entry]]:
    """Every array of a store with its path and manifest entry, the manifest itself left out."""
    yield from store.manifest.arrays.items()
    for part in store.manifest.parts:
        for name, entry in part.arrays.items():
            yield f"parts/{part.number}/{name}", entry


def verify(
    path: str | Path,
    storage_options: dict[str, Any] | None = None,
    progress: Progress = lambda items, unit: items,
    allow_partial: bool = False,
) -> Report:
    """Check every array of a store against the manifest, then the meaning of every sound part.

    Each array is read once, in threads: decoding and SHA-256 release the GIL. A thread holds
    some 16 MB of an array, or the tokens of a part. `progress(items, unit)` wraps a list, as tqdm
    does. `allow_partial` checks the published parts of an unfinished store. Raises StoreError if
    the store cannot be opened at all (see `open_store`); everything else is a problem in the
    report.
    """
    store = open_store(path, storage_options=storage_options, allow_partial=allow_partial)
    return verify_store(store, progress)


def verify_store(store: FeatureStore, progress: Progress = lambda items, unit: items) -> Report:
    """Check an open store as `verify` does, and close it."""
    report = Report(len(store.manifest.parts))
    absent = {problem.part: problem for problem in _absent_parts(store)}
    report.found += absent.values()
    names = [name for name, _ in entries(store)]
    listed = [item for item in entries(store) if _part_of(item[0]) not in absent]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        try:
            files = threads.submit(_files, store, names)
            read = threads.map(lambda item: _check_array(store, *item), listed)
            for (name, _), (problem, size) in zip(progress(listed, "array"), read, strict=True):
                report.arrays, report.bytes = report.arrays + 1, report.bytes + size
                if problem:
                    report.found.append(Problem(f"{_place(name)} {problem}", _part_of(name)))
            report.found += _check_groups(store, [name for name, _ in listed])
            report.found += [problem for problem in files.result() if problem.part not in absent]
            damaged = report.damaged_parts()
            places = [i for i, p in enumerate(store.manifest.parts) if p.number not in damaged]
            tokenizer = _tokenizer(store, report)
            report.found += [*_others(store, report), *_broken_calibration(store)]
            meant = threads.map(lambda place: _check_meaning(store, place, tokenizer), places)
            for _, found in zip(progress(places, "part"), meant, strict=True):
                report.found += found
        except BaseException:  # Ctrl-C, for one, must not wait for what is queued
            threads.shutdown(cancel_futures=True)
            raise
    store.close()
    return report


def _part_of(name: str) -> int | None:
    found = re.search(r"(?:^|\s)parts/(\d+)(?:/|\s|$)", name)
    return int(found[1]) if found else None


def _place(name: str) -> str:
    segments = name.split("/")
    if segments[0] == "parts":
        return f"part {segments[1]}: array {'/'.join(segments[2:])}"
    return f"array {name}"


def _check_array(store: FeatureStore, name: str, entry: Entry) -> tuple[str | None, int]:
    """The problem of an array (None if it is sound), and how many of its bytes were read."""
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
        return f"cannot be read{_chunks(store, name)}: {error}", size
    return None, size


def _chunks(store: FeatureStore, name: str) -> str:
    try:
        bad = store.source.damaged_chunks(name)
    except Exception:  # metadata that cannot be opened was reported already
        return ""
    return f" (chunk {', '.join(map(str, bad[:8]))})" if bad else ""


def _absent_parts(store: FeatureStore) -> Iterator[Problem]:
    """A problem for each part that cannot be opened, or whose attribute is not its entry."""
    shapes = PartShapes(store.features)
    for part in store.manifest.parts:
        try:
            found = store.source.attributes(f"parts/{part.number}")
            if found.keys() != {"part"} or _own_entry(found["part"], shapes) != part:
                yield Problem(f"part {part.number}: its attributes were altered", part.number)
        except StoreError as error:
            yield Problem(f"part {part.number}: cannot be opened: {error}", part.number)


def _own_entry(value: object, shapes: PartShapes) -> Part | None:
    """The part as its attribute `part` describes it, None if it does not; unknown keys are
    ignored, as in the manifest."""
    try:
        return Part.from_json(value, shapes, "")
    except StoreError:
        return None


def _check_groups(store: FeatureStore, names: list[str]) -> Iterator[Problem]:
    """A problem for each group but those of the parts and the root that has attributes."""
    groups = {"parts"}
    for name in names:
        segments = name.split("/")
        groups.update("/".join(segments[:depth]) for depth in range(1, len(segments)))
    for group in sorted(groups - {f"parts/{part.number}" for part in store.manifest.parts}):
        try:
            if store.source.attributes(group):
                yield Problem(f"group {group}: its attributes were altered", _part_of(group))
        except StoreError as error:
            yield Problem(f"group {group}: {error}", _part_of(group))


def _files(store: FeatureStore, names: list[str]) -> list[Problem]:
    """Problems that the container alone can tell: missing, extra and altered files.

    An unfinished store is not asked: its files come and go."""
    if store.meta["state"] != "sealed":
        return []
    lines = store.source.damage([*names, "manifest"])
    known = {None, *(part.number for part in store.manifest.parts)}
    found = [Problem(line, _part_of(line)) for line in lines]
    extra = dict.fromkeys(problem.part for problem in found if problem.part not in known)
    return [problem for problem in found if problem.part in known] + [
        Problem(f"extra part {number}, which is not in the manifest", number) for number in extra
    ]


def _tokenizer(store: FeatureStore, report: Report) -> Any:
    if "tokenizer.json" not in store.teacher_files():
        return None
    try:
        return store.tokenizer()
    except StoreError as error:
        if not any("teacher/files/tokenizer.json" in line for line in report.problems):
            report.found.append(Problem(str(error)))
        return None


def _others(store: FeatureStore, report: Report) -> list[Problem]:
    """Problems of what only some stores hold outside their parts; arrays that have a problem
    already are not read again."""
    found, told = [], "\n".join(report.problems)
    for group, read in OTHERS.items():
        if f"array {group}/" not in told:
            try:
                read(store)
            except StoreError as error:
                found.append(Problem(without_remedy(error)))
    return found


def _broken_calibration(store: FeatureStore) -> Iterator[Problem]:
    """A problem for each calibration by which no hidden state can be decoded."""
    for name, (mean, deviation) in store.calibration.items():
        if not (np.isfinite(mean) & np.isfinite(deviation) & (deviation > 0)).all():
            yield Problem(f"calibration of {name} is not finite with deviations over 0")


def _check_meaning(store: FeatureStore, place: int, tokenizer: Any) -> list[Problem]:
    number = store.manifest.parts[place].number
    try:
        lines = check_part(store.part(place), tokenizer)
    except StoreError as error:
        lines = [str(error)]
    return [Problem(line, number) for line in lines]
