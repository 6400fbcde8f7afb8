"""Open a store that is damaged, as far as what is left tells what it was; what was found wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from teachonce.store.containers.interface import Flaw, Source
from teachonce.store.containers.network import surely
from teachonce.store.containers.paths import open_source
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import StoreError, without_remedy
from teachonce.store.format.index import IndexedParts
from teachonce.store.format.manifest import (
    CREATED,
    Manifest,
    check_root,
    opening,
    seal_checksum,
)
from teachonce.store.read.manifests import readable_manifest, sealed_manifest, unfinished
from teachonce.store.read.store import FeatureStore
from teachonce.support.console import counted


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, as a line for a person.

    `part` is the number of its part, None outside the parts. `array` is the path of an array whose
    values are lost. `group` is the path of a group whose metadata are wrong; they hold nothing that
    is not known otherwise.
    """

    line: str
    part: int | None = None
    array: str | None = None
    group: str | None = None


@dataclass
class Report:
    """What `verify` read, and what it found.

    Problems name part, array and chunk. `strangers` are lines, too: files and objects that the
    format does not know. No reader looks at them. `repair` adds where it moved what is damaged, and
    what to do next.
    """

    parts: int
    arrays: int = 0
    bytes: int = 0
    found: list[Problem] = field(default_factory=list)
    odd: list[Flaw] = field(default_factory=list)
    aside: Path | None = None
    undo: str = ""
    advice: str = ""

    def take(self, other: Report) -> None:
        """Add what another report read and found."""
        self.arrays, self.bytes = self.arrays + other.arrays, self.bytes + other.bytes
        self.found += other.found
        self.odd += other.odd

    @property
    def problems(self) -> list[str]:
        return [problem.line for problem in self.found]

    @property
    def strangers(self) -> list[str]:
        return [flaw.line for flaw in self.odd]

    def damaged_parts(self) -> set[int]:
        """Numbers of the parts that have lost something that their arrays alone hold."""
        return {p.part for p in self.found if p.part is not None and p.group is None}

    def lost_outside(self) -> set[str]:
        """Paths of the arrays outside the parts that are lost."""
        return {p.array for p in self.found if p.part is None and p.array is not None}

    def facts(self, path: str) -> dict[str, Any]:
        """What was found, as JSON."""
        return {
            "path": path,
            "sound": not self.problems,
            "parts": self.parts,
            "arrays": self.arrays,
            "bytes": self.bytes,
            "problems": [without_remedy(problem) for problem in self.problems],
            "strangers": self.strangers,
        }

    def lines(self, path: str) -> Iterator[str]:
        """What was found, in lines."""
        yield from map(without_remedy, self.problems)
        yield from self.strangers
        if not self.problems:
            sound = "sound"
            if self.strangers:
                strangers = counted(len(self.strangers), "stranger")
                sound = f"sound, with {strangers} (not of the store, and left alone)"
            yield (
                f"{path}: {sound}: {counted(self.parts, 'part')}, {counted(self.arrays, 'array')}, "
                f"{self.bytes:,} decoded bytes match their checksums"
            )

    def check(self, path: str) -> None:
        """Raise StoreError if anything is wrong."""
        if self.problems:
            raise StoreError(
                f"{path}: damaged: {counted(len(self.problems), 'problem')}; `feature-store repair`"
                " moves what is damaged aside and says how it is made again; or restore it from a"
                " copy"
            )


@dataclass
class Opened:
    """A store that may be damaged; its calibration is not read.

    `attributes` are those of the root, made anew where they were lost, and `found` is what kept the
    store from being opened as it is. `manifest` and `checksum` are those of its sealing, as far as
    they are known: a manifest made anew that agrees with one of them is the one that was lost.
    """

    store: FeatureStore
    attributes: dict[str, Any]
    found: list[Problem]
    manifest: bytes | None = None
    checksum: str | None = None

    @property
    def sealed(self) -> bool:
        return bool(self.attributes["state"] == "sealed")


def open_damaged(
    path: str | Path, storage_options: dict[str, Any] | None = None, allow_partial: bool = True
) -> Opened:
    """Open a store by its manifest, or by what else of it says what it held.

    Raises StoreError if that is not enough, if the address of a store does not give it, or if it is
    unfinished and not `allow_partial`.
    """
    source = _source(path, storage_options)
    try:
        return surely(source.remote, lambda: _opened(source, allow_partial))
    except BaseException:
        source.close()
        raise


def _source(path: str | Path, storage_options: dict[str, Any] | None) -> Source:
    try:
        return open_source(path, storage_options)
    except StoreError:
        if "://" in str(path) or not Path(path, "manifest").is_dir():
            raise
        return ZarrSource(str(path))  # a store whose root is lost


def _opened(source: Source, allow_partial: bool) -> Opened:
    try:
        with opening():
            attributes = source.attributes()
        features = check_root(attributes, source.path)
        if attributes["state"] == "sealed":
            with opening():
                manifest, data = sealed_manifest(source, attributes, features)
                if isinstance(manifest.parts, IndexedParts):
                    manifest.parts.check()
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError) or "://" in source.path:
            raise
        return _salvaged(source, error)
    if attributes["state"] == "sealed":
        store = FeatureStore(source, attributes, features, manifest, calibrated=False)
        return Opened(store, attributes, [], data, attributes["checksum"])
    if not allow_partial:
        raise unfinished(source)
    manifest, found = _own_manifest(source, attributes)
    store = FeatureStore(source, attributes, features, manifest, calibrated=False)
    return Opened(store, attributes, found)


def _own_manifest(source: Source, attributes: dict[str, Any]) -> tuple[Manifest, list[Problem]]:
    """The manifest that the parts' own entries give, and a problem for each that gives none."""
    features = check_root(attributes, source.path)
    manifest, unreadable = readable_manifest(source, attributes, features)
    return manifest, [
        Problem(f"part {number}: cannot be opened: {why}", number)
        for number, why in unreadable.items()
    ]


def _salvaged(source: Source, error: StoreError) -> Opened:
    """Open a sealed store, which `error` keeps from being opened, by what the rest of it says.

    Raises `error` if the rest does not say enough.
    """
    try:
        root = source.attributes()
    except StoreError:
        root = {}
    attributes, data = _attributes(source, root)
    if attributes is None:
        raise error
    manifest, found = _own_manifest(source, attributes)
    features = check_root(attributes, source.path)
    store = FeatureStore(source, attributes, features, manifest, calibrated=False)
    store.watch.opened = None  # the root is lost or altered: no change can be seen there
    found.insert(0, Problem(str(error), group=""))
    return Opened(store, attributes, found, data, root.get("checksum"))


def _attributes(source: Source, root: dict[str, Any]) -> tuple[dict[str, Any] | None, bytes | None]:
    """Root attributes of a sealed store, None if they are lost; and its manifest, if it is sound.

    The manifest holds them, too. It is sound if the checksum at the root fits it; otherwise the
    root is believed, unless it cannot be read.
    """
    found = dict(root)
    try:
        array = source.array("manifest")
        data = array.read(0, array.shape[0]).tobytes()
        manifest: Any = json.loads(data)
    except (StoreError, ValueError, RecursionError):
        data, manifest = b"", None
    fits = root.get("checksum") == seal_checksum(data, str(root.get("created")))
    sound = isinstance(manifest, dict) and (fits or not root)
    if sound:
        known = manifest.get("attributes")
        known = (known if isinstance(known, dict) else {}) | {"arrays": manifest.get("arrays")}
        found |= {key: value for key, value in known.items() if found.get(key) != value}
    if "arrays" not in found:  # a store of before these were kept at the root
        return None, None
    if not CREATED.fullmatch(str(found.get("created"))):
        written = datetime.fromtimestamp(Path(source.path).stat().st_mtime, UTC)
        found["created"] = written.strftime("%Y-%m-%dT%H:%M:%SZ")
    state = "writing" if root.get("state") == "writing" else "sealed"
    return found | {"state": state}, data if sound else None
