"""Read a whole store, and compare it with its manifest and with the rules of FORMAT.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store.containers.interface import Flaw, damaged_chunks, groups_of
from teachonce.store.containers.network import fetch_attempts
from teachonce.store.errors import StoreError, without_remedy
from teachonce.store.extras.mixed_vocab import GROUP as MIXED_VOCAB
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.extras.word_counts import GROUP as WORD_COUNTS
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.format.features import Calibration
from teachonce.store.format.index import GROUP as INDEX
from teachonce.store.format.index import IndexedParts
from teachonce.store.format.layout import PartShapes, part_number, part_of
from teachonce.store.format.manifest import Entry, Part
from teachonce.store.read.part import checksum
from teachonce.store.read.part_laws import check_part
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.damaged import DamagedStore, Problem, Report, open_damaged
from teachonce.store.tools.stored_tokens import parts_with_other_tokens
from teachonce.support.background import in_order

MAX_THREADS = 16
TOKENIZER, SETTINGS = "tokenizer.json", ("config.json", "tokenizer_config.json")
EXTRAS: dict[str, Callable[[FeatureStore], object]] = {
    MIXED_VOCAB: MixedVocab.stored,
    WORD_COUNTS: WordCounts.stored,
}
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


def outside_entries(store: FeatureStore) -> Iterator[tuple[str, Entry]]:
    """Yield path and entry of every array outside the parts except the manifest."""
    yield from store.manifest.arrays.items()
    if isinstance(store.manifest.parts, IndexedParts):
        for name, entry in store.manifest.parts.entries.items():
            yield f"{INDEX}/{name}", entry


def verify(
    path: str | Path,
    progress: Progress = lambda items, unit: items,
    allow_partial: bool = False,
) -> Report:
    """Check every array of a store against the manifest, then the values of every sound part.

    A thread checks one part at a time and holds about 16 MB of an array, or the tokens of the part.
    `progress(items, unit)` wraps a sequence, as tqdm does. With `allow_partial`, the published
    parts of an unfinished store are checked. If the root or the manifest is damaged, the rest of
    the store is checked as far as its metadata can be recovered. Raises StoreError if they cannot
    be recovered, if the store is unfinished, or if it was rewritten during the check; everything
    else is a problem in the report.
    """
    return verify_opened(open_damaged(path, allow_partial=allow_partial), progress)


def verify_opened(opened: DamagedStore, progress: Progress) -> Report:
    """Check a store that may be damaged as `verify` does, and close it."""
    report = verify_store(opened.store, progress)
    # For a store behind a URL the check is a request, so it is made only if something looks
    # damaged.
    if not opened.damage and (report.damage or not opened.store.source.remote):
        opened.store.watch.check()  # files replaced by another process are not damage
    if opened.damage:  # these include the problems of root and manifest
        rest = [problem for problem in report.damage if problem.group not in ("", "manifest")]
        report.damage = opened.damage + rest
        if opened.attributes["version"] > 1:  # without the manifest its index has no use
            report.unknown_flaws = [
                flaw for flaw in report.unknown_flaws if flaw.path.split("/")[0] != INDEX
            ]
    return report


def verify_store(store: FeatureStore, progress: Progress = lambda items, unit: items) -> Report:
    """Check an open store as `verify` does, and close it."""
    count = len(store.manifest.parts)
    report = Report(count)
    # Threads suffice, and each array is read once: decoding and SHA-256 release the GIL.
    workers = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads:
        try:
            names = [name for name, _ in outside_entries(store)]
            numbers = set(store.manifest.numbers.tolist())
            # Lists a whole folder, or hashes a whole HDF5 file, while the arrays are read.
            # Files inside the parts are listed with each part.
            flaws = threads.submit(_container_flaws, store, [*names, "manifest"], "", numbers)
            _check_outside(store, report, threads)
            calibration = _calibration(store, report)
            shapes, missing = PartShapes(store.features), _missing_parts(store, report)
            verify_part = partial(_verify_part, store, calibration, shapes, missing)
            reports = in_order(threads, verify_part, range(count), 2 * workers)
            for _, part_report in zip(progress(range(count), "part"), reports, strict=True):
                report.take(part_report)
            _add_flaws(report, flaws.result(), set(names))
            report.damage += [*_broken_outside(store, report), *_broken_tokens(store, report)]
            report.unknown_flaws.sort(key=lambda flaw: flaw.path)
        except BaseException:  # on Ctrl-C, do not wait for queued parts
            threads.shutdown(cancel_futures=True)
            raise
    store.close()
    return report


def _check_outside(store: FeatureStore, report: Report, threads: ThreadPoolExecutor) -> None:
    """Read the arrays outside the parts, and check the groups above them."""
    listed = list(outside_entries(store))
    read = threads.map(lambda item: _check_with_retries(store, *item), listed)
    for (name, _), checked in zip(listed, read, strict=True):
        _record_array(report, name, *checked)
    report.damage += _check_groups(store, groups_of(name for name, _ in listed) - {""})


def _verify_part(
    store: FeatureStore, calibration: Calibration, shapes: PartShapes, missing: set[int], index: int
) -> Report:
    """Check the part at an index: attributes, arrays, groups, files, and, if all arrays are sound,
    the rules for their values."""
    part, report = store.manifest.parts[index], Report(1)
    if part.number in missing:
        line = f"part {part.number}: cannot be opened: it is missing"
        report.damage.append(Problem(line, part.number))
        return report
    prefix = f"parts/{part.number}"
    report.damage += _altered_attributes(store, shapes, part)
    names = [f"{prefix}/{name}" for name in part.arrays]
    for name, entry in zip(names, part.arrays.values(), strict=True):
        _record_array(report, name, *_check_with_retries(store, name, entry))
    report.damage += _check_groups(store, groups_of(names, prefix) - {prefix})
    _add_flaws(report, _container_flaws(store, names, prefix), set(names))
    # The laws read the arrays again, so a damaged one would be reported twice.
    if not report.damaged_parts():
        try:
            lines = check_part(store.part(index), calibration)
        except StoreError as error:
            lines = [str(error)]
        report.damage += [Problem(line, part.number) for line in lines]
    return report


def _record_array(report: Report, name: str, problem: str | None, size: int) -> None:
    """Record that an array was read, and its problem."""
    report.arrays, report.bytes = report.arrays + 1, report.bytes + size
    if problem:
        _, number, array = name.split("/", 2) if name.startswith("parts/") else ("", "", "")
        subject = f"part {number}: array {array}" if number else f"array {name}"
        report.damage.append(_problem(f"{subject} {problem}", name, is_array=True))


def _check_with_retries(store: FeatureStore, name: str, entry: Entry) -> tuple[str | None, int]:
    """Return the problem of an array (None if it is sound) and the number of bytes read."""
    try:
        for _ in fetch_attempts(store.source.remote):
            problem, size = _check_array(store, name, entry)
            if problem is None:
                break
        return problem, size
    except StoreError as error:  # the container has fetched it again already
        if isinstance(error.__cause__, PermissionError):  # not damage
            raise
        return f"cannot be read{_damaged_chunks(store, name)}: {error}", 0


def _check_array(store: FeatureStore, name: str, entry: Entry) -> tuple[str | None, int]:
    array = store.source.array(name)
    # Compared before anything is read (FORMAT.md, section 8).
    if array.shape != entry.shape or array.dtype.name != entry.dtype:
        expected = f"{entry.dtype}{list(entry.shape)}"
        return f"is {array.dtype.name}{list(array.shape)}, not {expected}", 0
    digest = checksum(array)
    size = array.dtype.itemsize * int(np.prod(array.shape, dtype=np.int64))
    if digest != entry.sha256:
        return "does not match its checksum", size
    if entry.fingerprint and entry.fingerprint != store.source.fingerprint(name):
        return "has an altered zarr.json", size
    if violation := store.source.format_violation(name):
        return f"is stored with {violation} (FORMAT.md, section 3)", size
    return None, size


def _damaged_chunks(store: FeatureStore, name: str) -> str:
    try:
        bad = damaged_chunks(store.source.array(name))
    except Exception:  # metadata that cannot be opened was reported already
        return ""
    return f" (chunk {', '.join(map(str, bad))})" if bad else ""


def _missing_parts(store: FeatureStore, report: Report) -> set[int]:
    """Return the numbers of the parts that are missing."""
    missing = set(store.manifest.numbers.tolist())
    for _ in fetch_attempts(store.source.remote):  # a listing may be corrupted by the network, too
        if missing:
            try:
                missing -= {part_number(name) for name in store.source.members("parts")}
            except StoreError as error:
                line = f"group parts: {without_remedy(error)}"
                report.damage.append(Problem(line, group="parts"))
                break
    return missing


def _altered_attributes(store: FeatureStore, shapes: PartShapes, part: Part) -> Iterator[Problem]:
    """Yield a problem if the attributes of a part differ from its entry in the manifest."""
    group = f"parts/{part.number}"
    try:
        for _ in fetch_attempts(store.source.remote):
            attrs = store.source.attributes(group)
            with suppress(StoreError):  # the attribute is not a valid entry
                if attrs.keys() == {"part"} and Part.from_json(attrs["part"], shapes, "") == part:
                    return
        line = f"part {part.number}: its attributes were altered"
    except StoreError as error:
        line = f"part {part.number}: its attributes cannot be read: {error}"
    yield Problem(line, part.number, group=group)


def _check_groups(store: FeatureStore, groups: set[str]) -> Iterator[Problem]:
    """Yield a problem for each of these groups that has attributes: in a sound store they have
    none."""
    for group in sorted(groups):
        try:
            # A problem only if every attempt returns attributes: one response may be corrupted.
            if all(store.source.attributes(group) for _ in fetch_attempts(store.source.remote)):
                yield Problem(
                    f"group {group}: its attributes were altered", part_of(group), group=group
                )
        except StoreError as error:
            yield Problem(f"group {group}: {error}", part_of(group), group=group)


def _container_flaws(
    store: FeatureStore, names: list[str], group: str = "", parts: Container[int] = ()
) -> list[Flaw]:
    """Return the damage that the container finds in the files of a group (`StoreSource.flaws`);
    none for an unfinished store."""
    # A writer adds and removes files of an unfinished store.
    return store.source.flaws(names, group, parts) if store.meta["state"] == "sealed" else []


def _add_flaws(report: Report, flaws: list[Flaw], arrays: set[str]) -> None:
    """Add flaws of the container to the report, except for lost arrays and groups with unreadable
    metadata, which were reported already."""
    reported = {problem.group for problem in report.damage}
    for flaw in flaws:
        if flaw.unknown:
            report.unknown_flaws.append(flaw)
        elif flaw.path not in reported and not (flaw.explained_by_unknown and report.unknown_flaws):
            report.damage.append(_problem(flaw.line, flaw.path, flaw.path in arrays))


def _problem(line: str, path: str, is_array: bool) -> Problem:
    """Make the problem of an array or a group."""
    # An array of the index is not data that is lost: the parts hold the same entries.
    if is_array and not path.startswith(f"{INDEX}/"):
        return Problem(line, part_of(path), array=path)
    return Problem(line, part_of(path), group=path)


def _broken_outside(store: FeatureStore, report: Report) -> Iterator[Problem]:
    """Yield a problem for each thing outside the parts that breaks a rule: optional groups
    (store/extras), weights of the teacher with NaN or infinity, files that cannot be parsed.

    A group with a damaged array is skipped, because the array was reported.
    """
    reads: dict[str, Callable[[], object]] = {g: partial(read, store) for g, read in EXTRAS.items()}
    for name in store.manifest.arrays:
        if name.startswith(("teacher/weights/", "teacher/head/")):
            reads[name] = partial(store.outside, name)
    for name in set(SETTINGS) & set(store.teacher_files()):
        reads[f"teacher/files/{name}"] = partial(store.teacher_settings, name)
    lost = report.lost_outside()
    for path, read in sorted(reads.items()):
        if not any(f"{array}/".startswith(f"{path}/") for array in lost):
            try:
                read()
            except StoreError as error:
                yield Problem(without_remedy(error))


def _broken_tokens(store: FeatureStore, report: Report) -> Iterator[Problem]:
    """Yield a problem for each sound part whose tokens differ from what the tokenizer makes of its
    text."""
    if f"teacher/files/{TOKENIZER}" not in store.manifest.arrays.keys() - report.lost_outside():
        return
    damaged, parts = report.damaged_parts(), store.manifest.parts
    indices = [index for index, part in enumerate(parts) if part.number not in damaged]
    try:
        # All parts in one call: a tokenizer that is not plain runs in one bounded process for all.
        for index, line in parts_with_other_tokens(store, indices):
            yield Problem(line, parts[index].number)
    except StoreError as error:
        yield Problem(str(error))


def _calibration(store: FeatureStore, report: Report) -> Calibration:
    """Return the usable calibrations of hidden states; report a problem for each unusable one."""
    lost, calibration = report.lost_outside(), {}
    for name in store.features.hidden:
        if not any(array.startswith(f"calibration/hidden/{name}/") for array in lost):
            try:
                calibration[name] = store.read_calibration(name)
            except StoreError as error:
                line = without_remedy(error).removeprefix(f"{store.path}: ")
                report.damage.append(Problem(line))
    return calibration
