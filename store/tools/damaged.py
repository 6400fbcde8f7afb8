"""Open a damaged store by its sound metadata, and report the problems found in a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from teachonce.store.containers.interface import Flaw, StoreSource
from teachonce.store.containers.network import with_refetches
from teachonce.store.containers.paths import open_source
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import StoreError, command, without_remedy
from teachonce.store.format.index import IndexedParts
from teachonce.store.format.layout import PartShapes
from teachonce.store.format.manifest import (
    CREATED,
    Manifest,
    check_root,
    seal_checksum,
    suggest_repair,
)
from teachonce.store.read.manifests import (
    manifest_of,
    own_entry,
    part_numbers,
    sealed_manifest,
    unfinished_error,
)
from teachonce.store.read.store import FeatureStore
from teachonce.support.console import counted


@dataclass(frozen=True)
class Problem:
    """Describes one problem of a store, as a line for a person.

    part: number of its part; None outside the parts. array: path of an array whose values are lost.
        group: path of a group whose metadata are wrong; they can be derived from the rest of the
        store.
    """

    line: str
    part: int | None = None
    array: str | None = None
    group: str | None = None


@dataclass
class Report:
    """Holds the counts and the problems that `verify` found.

    Problems name part, array and chunk. `unknown` lists files and objects that the format does not
    define, which no reader opens. `repair` adds the quarantine folder and the next step.
    """

    parts: int
    arrays: int = 0
    bytes: int = 0
    damage: list[Problem] = field(default_factory=list)
    unknown_flaws: list[Flaw] = field(default_factory=list)
    quarantine: Path | None = None
    undo: str = ""
    advice: str = ""

    def take(self, other: Report) -> None:
        """Add the counts and problems of another report."""
        self.arrays, self.bytes = self.arrays + other.arrays, self.bytes + other.bytes
        self.damage += other.damage
        self.unknown_flaws += other.unknown_flaws

    @property
    def problems(self) -> list[str]:
        return [problem.line for problem in self.damage]

    @property
    def unknown(self) -> list[str]:
        return [flaw.line for flaw in self.unknown_flaws]

    def damaged_parts(self) -> set[int]:
        """Return the numbers of the parts that have lost values, which nothing else in the store
        holds."""
        return {p.part for p in self.damage if p.part is not None and p.group is None}

    def lost_outside(self) -> set[str]:
        """Return the paths of the arrays outside the parts that are lost."""
        return {p.array for p in self.damage if p.part is None and p.array is not None}

    def facts(self, path: str) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "path": path,
            "sound": not self.problems,
            "parts": self.parts,
            "arrays": self.arrays,
            "bytes": self.bytes,
            "problems": [without_remedy(problem) for problem in self.problems],
            "unknown": self.unknown,
        }

    def lines(self, path: str) -> Iterator[str]:
        """Yield the result as lines of text."""
        yield from map(without_remedy, self.problems)
        yield from self.unknown
        if not self.problems:
            sound = "sound"
            if self.unknown:
                items = counted(len(self.unknown), "unknown item")
                sound = f"sound, with {items} (not part of the format, left unchanged)"
            yield (
                f"{path}: {sound}: {counted(self.parts, 'part')}, {counted(self.arrays, 'array')}, "
                f"{self.bytes:,} decoded bytes match their checksums"
            )

    def check(self, path: str) -> None:
        """Raise StoreError if there is a problem."""
        if self.problems:
            raise StoreError(
                f"{path}: damaged: {counted(len(self.problems), 'problem')}; run"
                f" {command('repair', path)}, which prints the command that makes the damaged parts"
                " again; or restore the store from a copy"
            )


@dataclass
class DamagedStore:
    """Reads a store that may be damaged. Its calibration is not read.

    attributes: the root attributes, derived from the rest of the store if they were lost.
    damage: the problems that a normal reader would raise.
    manifest, checksum: the manifest and the checksum of the sealed store, if known; a derived
        manifest that matches one of them equals the lost one.
    """

    store: FeatureStore
    attributes: dict[str, Any]
    damage: list[Problem]
    manifest: bytes | None = None
    checksum: str | None = None

    @property
    def sealed(self) -> bool:
        return bool(self.attributes["state"] == "sealed")


def open_damaged(
    path: str | Path, storage_options: dict[str, Any] | None = None, allow_partial: bool = True
) -> DamagedStore:
    """Open a store by its manifest or, if the manifest is damaged, by the entries in its parts.

    Raises StoreError if the entries do not suffice, if a URL cannot be read, or if the store is
    unfinished and `allow_partial` is false.
    """
    source = _source(path, storage_options)
    try:
        return with_refetches(source.remote, lambda: _opened(source, allow_partial))
    except BaseException:
        source.close()
        raise


def _source(path: str | Path, storage_options: dict[str, Any] | None) -> StoreSource:
    try:
        return open_source(path, storage_options)
    except StoreError:
        # Without its root, a Zarr store can be opened only if the manifest is left: nothing else
        # has the features by which parts are read.
        if "://" in str(path) or not Path(path, "manifest").is_dir():
            raise
        return ZarrSource(str(path))


def _opened(source: StoreSource, allow_partial: bool) -> DamagedStore:
    try:
        with suggest_repair():
            attributes = source.attributes()
        features = check_root(attributes, source.path)
        if attributes["state"] == "sealed":
            with suggest_repair():
                manifest, data = sealed_manifest(source, attributes, features)
                # Every page of the index is read now, so that damaged pages are salvaged from the
                # parts. A damaged page that is found later would end the check in the middle.
                if isinstance(manifest.parts, IndexedParts):
                    manifest.parts.check()
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError) or "://" in source.path:
            raise
        return _salvaged(source, error)
    if attributes["state"] == "sealed":
        # Not calibrated: `verify` reads the calibration itself, and reports a damaged one.
        store = FeatureStore(source, attributes, features, manifest, calibrated=False)
        return DamagedStore(store, attributes, [], data, attributes["checksum"])
    if not allow_partial:
        raise unfinished_error(source)
    manifest, problems = _own_manifest(source, attributes)
    store = FeatureStore(source, attributes, features, manifest, calibrated=False)
    return DamagedStore(store, attributes, problems)


def _own_manifest(
    source: StoreSource, attributes: dict[str, Any]
) -> tuple[Manifest, list[Problem]]:
    """Return a manifest built from the entries in the parts' own attributes, and a problem for each
    part without a readable entry."""
    shapes, parts, problems = PartShapes(check_root(attributes, source.path)), [], []
    for number in part_numbers(source):
        try:
            parts.append(own_entry(source, number, shapes))
        except StoreError as error:
            problems.append(Problem(f"part {number}: cannot be opened: {error}", number))
    return manifest_of(source, attributes, parts), problems


def _salvaged(source: StoreSource, error: StoreError) -> DamagedStore:
    """Open a sealed store that a normal reader refuses with `error`, from its undamaged metadata.

    Raises `error` if they do not suffice.
    """
    try:
        root = source.attributes()
    except StoreError:
        root = {}
    attributes, data = _attributes(source, root)
    if attributes is None:
        raise error
    manifest, problems = _own_manifest(source, attributes)
    features = check_root(attributes, source.path)
    store = FeatureStore(source, attributes, features, manifest, calibrated=False)
    store.watch.opened = None  # the root is lost or altered, so later changes cannot be detected
    problems.insert(0, Problem(str(error), group=""))
    return DamagedStore(store, attributes, problems, data, root.get("checksum"))


def _attributes(
    source: StoreSource, root: dict[str, Any]
) -> tuple[dict[str, Any] | None, bytes | None]:
    """Return the root attributes of a sealed store (None if lost), and its manifest if it is sound.

    The manifest repeats the attributes. It is sound if it matches the checksum in the root, or if
    the root cannot be read. If it is not sound, the root's own attributes are returned.
    """
    result = dict(root)
    try:
        array = source.array("manifest")
        data = array.read(0, array.shape[0]).tobytes()
        manifest: Any = json.loads(data)
    except (StoreError, ValueError, RecursionError):
        data, manifest = b"", None
    fits = root.get("checksum") == seal_checksum(data, str(root.get("created")))
    sound = isinstance(manifest, dict) and (fits or not root)
    if sound:
        stored = manifest.get("attributes")
        stored = (stored if isinstance(stored, dict) else {}) | {"arrays": manifest.get("arrays")}
        # If values are equal, the root's are retained. JSON texts are compared, because True == 1
        # in Python.
        as_json = partial(json.dumps, sort_keys=True)
        result |= {k: v for k, v in stored.items() if as_json(result.get(k)) != as_json(v)}
    if "arrays" not in result:  # older releases wrote `arrays` to the manifest alone
        return None, None
    # Only the root has `created` (FORMAT.md, section 8). The time of the last change replaces it.
    if not CREATED.fullmatch(str(result.get("created"))):
        written = datetime.fromtimestamp(Path(source.address).stat().st_mtime, UTC)
        result["created"] = written.strftime("%Y-%m-%dT%H:%M:%SZ")
    state = "writing" if root.get("state") == "writing" else "sealed"
    return result | {"state": state}, data if sound else None
