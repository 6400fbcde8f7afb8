"""Take damaged parts out of a store; the command that made it then makes only these again."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py

from store.containers.hdf5.file import Hdf5Sink, create_group
from store.containers.hdf5.staging import Hdf5Staging
from store.containers.hdf5.tree import FILE_ALTERED
from store.containers.interface import Source, Staging
from store.containers.paths import staging_of
from store.containers.zarr.tree import GROUP
from store.errors import StoreError
from store.format.manifest import CREATED, check_root, seal_checksum
from store.read.store import FeatureStore, open_store
from store.read.unfinished import readable_manifest
from store.tools.verify import Problem, Progress, Report, verify_store
from store.write.writer import StoreWriter
from support import files
from support.errors import UserError
from support.lease import Lease

ASIDE = ".tmp-repair-"  # FORMAT.md, section 9: such names are a killed writer's, and removed
ZARR_GROUP = r"(altered|missing) file (.*/)?zarr\.json|group .*"


def repair(path: str | Path, progress: Progress = lambda items, unit: items) -> tuple[int, Report]:
    """Verify a store; if parts are damaged, drop them and make the store an unfinished one.

    Returns how many parts are left, and what was found (nothing: the store is unchanged). Sound
    parts and everything outside the parts stay, so the store has its old bytes when it is sealed
    again. A damaged manifest is made anew from the entries that the parts hold themselves. After a
    kill another call repairs the store. Raises UserError if there is damage outside the parts,
    which cannot be made again alone.
    """
    staging = staging_of(path)
    if not staging.path.exists():
        raise UserError(f"{path}: no such file or folder; check the name, or run teacher-dump")
    lease = Lease(staging.path)
    try:
        staging.clear()  # what a killed repair, or a killed writer, left
        if isinstance(staging, Hdf5Staging) and StoreWriter.peek(path, "sealed"):
            staging.clean()  # beside one that cannot be read they may be all that there is
        sealed = StoreWriter.peek(path) is None
        store, attributes, found = _opened(staging, sealed)
        report = verify_store(store, progress)
        outside = [
            p.line for p in report.found if p.part is None and not _made_anew(staging, p.line)
        ]
        if outside:
            raise UserError(
                f"{path}: {outside[0]}: this lies outside the parts and cannot be made again alone;"
                " restore it from a copy, or remove the store and dump again"
            )
        report.found[:0] = found
        keep = {part.number for part in store.manifest.parts} - report.damaged_parts()
        lease.check()
        if report.found and isinstance(staging, Hdf5Staging):
            if sealed:
                _unseal_hdf5(staging, attributes, keep, lease)
            else:
                _drop_files(staging.parts, keep)
        elif report.found:
            _unseal_zarr(staging.path, attributes, keep, lease)
        return len(keep), report
    except OSError as error:
        raise StoreError(f"{path}: cannot be repaired: {files.reason(error)}") from error
    finally:
        lease.close()


def _opened(staging: Staging, sealed: bool) -> tuple[FeatureStore, dict[str, Any], list[Problem]]:
    """Open a store as an unfinished one; returns it, its root attributes, and what kept it from
    being opened as it is."""
    found: list[Problem] = []
    try:
        store = open_store(staging.path, allow_partial=True)
        attributes = store.source.attributes()
    except StoreError as error:
        if not sealed or isinstance(error.__cause__, PermissionError):
            raise
        store, attributes, found = _salvaged(staging.source(), staging.path, error)
    entries = {name: entry.to_json() for name, entry in store.manifest.arrays.items()}
    attributes = attributes | {"state": "writing", "arrays": entries}
    attributes.pop("checksum", None)
    return store, attributes, found


def _salvaged(
    source: Source, path: Path, error: StoreError
) -> tuple[FeatureStore, dict[str, Any], list[Problem]]:
    """Open a sealed store, which `error` keeps from being opened, by what the rest of it says.

    Returns it with the parts whose own entries can be read, its root attributes as an unfinished
    store, and what is wrong. Raises `error` if the rest does not say enough.
    """
    attributes = _salvaged_attributes(source, path)
    if attributes is None:
        raise error
    features = check_root(attributes, source.path)
    manifest, unreadable = readable_manifest(source, attributes, features)
    found = [Problem(str(error))]
    found += [Problem(f"part {n}: cannot be opened: {why}", n) for n, why in unreadable.items()]
    return FeatureStore(source, attributes, features, manifest), attributes, found


def _salvaged_attributes(source: Source, path: Path) -> dict[str, Any] | None:
    """Root attributes as an unfinished store has them, None if they are lost.

    The manifest holds them, too. It is sound if the checksum at the root fits it; otherwise the
    root is believed, unless it cannot be read.
    """
    try:
        root = source.attributes()
    except StoreError:
        root = {}
    try:
        array = source.array("manifest")
        data = array.read(0, array.shape[0]).tobytes()
        manifest: Any = json.loads(data)
    except (StoreError, ValueError, RecursionError):
        data, manifest = b"", None
    fits = root.get("checksum") == seal_checksum(data, str(root.get("created")))
    if isinstance(manifest, dict) and (fits or not root):
        known = manifest.get("attributes")
        known = (known if isinstance(known, dict) else {}) | {"arrays": manifest.get("arrays")}
        root |= {key: value for key, value in known.items() if root.get(key) != value}
    if "arrays" not in root:  # a store of before these were kept at the root
        return None
    if not CREATED.fullmatch(str(root.get("created"))):
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        root["created"] = written.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {key: root[key] for key in root if key != "checksum"} | {"state": "writing"}


def _made_anew(staging: Staging, line: str) -> bool:
    """Whether the file of this problem is written again when the store is unsealed or sealed."""
    if isinstance(staging, Hdf5Staging):
        return line == FILE_ALTERED
    return re.fullmatch(ZARR_GROUP, line, re.DOTALL) is not None


def _unseal_zarr(path: Path, attributes: dict[str, Any], keep: set[int], lease: Lease) -> None:
    kept = {"zarr.json", *map(str, keep)}
    # The damaged parts go first: a store that is killed here must never be sealed with them.
    for entry in sorted((path / "parts").iterdir()):
        if entry.name not in kept:
            files.rename(entry, entry.with_name(f"{ASIDE}{entry.name}"))
    files.discard(path / "parts", ASIDE)
    lease.check()
    parents = [Path(name).parents for name in attributes["arrays"]]
    for group in {"parts", *(str(group) for groups in parents for group in groups)} - {"."}:
        _write_group(path, group, {})
    _write_group(path, "", attributes)
    shutil.rmtree(path / "manifest", ignore_errors=True)


def _write_group(path: Path, group: str, attributes: dict[str, Any]) -> None:
    aside, node = path / f"{ASIDE}group", GROUP | {"attributes": attributes}
    aside.write_text(json.dumps(node, indent=1), "utf-8")
    files.sync(aside)
    files.rename(aside, path / group / "zarr.json")


def _drop_files(parts: Path, keep: set[int]) -> None:
    for file in parts.glob("*.h5"):
        if file.stem not in map(str, keep):
            file.unlink()


def _unseal_hdf5(
    staging: Hdf5Staging, attributes: dict[str, Any], keep: set[int], lease: Lease
) -> None:
    staging.parts.mkdir(exist_ok=True)
    new = staging.path.with_name(f".{staging.path.name}.new-repair")
    with h5py.File(staging.path, "r") as sealed:
        for number in sorted(keep):
            part = Hdf5Sink(staging.parts / f"{ASIDE}{number}.h5")
            sealed.copy(f"parts/{number}", create_group(part.file, "parts"))
            part.close()
            files.rename(staging.parts / f"{ASIDE}{number}.h5", staging.parts / f"{number}.h5")
        begun = Hdf5Sink(new)
        begun.attributes("parts", {})
        for name in sorted(set(sealed) - {"parts", "manifest"}):
            sealed.copy(name, begun.file)
        begun.attributes("", attributes)
        begun.close()
    lease.check()
    files.rename(new, staging.path)
