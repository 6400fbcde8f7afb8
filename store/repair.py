"""Take the damaged parts out of a store; the command that made it then makes just these again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py

from store import disk
from store.errors import StoreError, UserError
from store.hdf5_staging import Hdf5Staging
from store.hdf5_tree import FILE_ALTERED, Hdf5Sink, create_group
from store.lease import Lease
from store.reader import open_store
from store.verify import Progress, Report, verify
from store.writer import StoreWriter, staging_of
from store.zarr_tree import GROUP

ASIDE = ".tmp-repair-"  # FORMAT.md, section 9: such names are a killed writer's, and removed
SEALED_ANEW = (FILE_ALTERED, "altered file zarr.json", "altered file manifest/zarr.json")


def repair(path: str | Path, progress: Progress = lambda items, unit: items) -> tuple[int, Report]:
    """Verify a store; if parts of it are damaged, drop these and make it an unfinished one.

    Returns how many parts are left, and what was found (nothing: the store is as it was). The sound
    parts, and what the store was begun with, stay: sealed again it has the bytes that it had.
    Killed at any moment, it is repaired by another call. Raises UserError if there is damage
    outside the parts, which cannot be made again alone.
    """
    staging = staging_of(path)
    if not staging.path.exists():
        raise UserError(f"{path}: no such file or folder")
    lease = Lease(staging.path)
    try:
        staging.clear()  # what a killed repair, or a killed writer, left
        sealed = StoreWriter.peek(path) is None
        if sealed and isinstance(staging, Hdf5Staging):
            staging.clean()
        report = verify(path, progress=progress, allow_partial=True)
        outside = [p.line for p in report.found if p.part is None and p.line not in SEALED_ANEW]
        if outside:
            raise UserError(
                f"{path}: {outside[0]}: this lies outside the parts and cannot be made again alone;"
                " restore it from a copy, or remove the store and dump again"
            )
        store = open_store(path, allow_partial=True)
        keep = {part.number for part in store.manifest.parts} - report.damaged_parts()
        entries = {name: entry.to_json() for name, entry in store.manifest.arrays.items()}
        attributes = store.source.attributes() | {"state": "writing", "arrays": entries}
        attributes.pop("checksum", None)
        store.close()
        if report.found and isinstance(staging, Hdf5Staging):
            if sealed:
                _unseal_hdf5(staging, attributes, keep)
            else:
                _drop_files(staging.parts, keep)
        elif report.found:
            _unseal_zarr(staging.path, attributes, keep)
        return len(keep), report
    except OSError as error:
        raise StoreError(f"{path}: cannot be repaired: {disk.reason(error)}") from error
    finally:
        lease.close()


def _unseal_zarr(path: Path, attributes: dict[str, Any], keep: set[int]) -> None:
    kept = {"zarr.json", *map(str, keep)}
    # The damaged parts go first: a store that is killed here must never be sealed with them.
    for entry in sorted((path / "parts").iterdir()):
        if entry.name not in kept:
            disk.rename(entry, entry.with_name(f"{ASIDE}{entry.name}"))
    disk.discard(path / "parts", ASIDE)
    node = json.dumps(GROUP | {"attributes": attributes}, indent=1)
    disk.write(path / "zarr.json", node.encode("utf-8"))
    shutil.rmtree(path / "manifest", ignore_errors=True)


def _drop_files(parts: Path, keep: set[int]) -> None:
    for file in parts.glob("*.h5"):
        if file.stem not in map(str, keep):
            file.unlink()


def _unseal_hdf5(staging: Hdf5Staging, attributes: dict[str, Any], keep: set[int]) -> None:
    staging.parts.mkdir(exist_ok=True)
    new = staging.path.with_name(f".{staging.path.name}.new-repair")
    with h5py.File(staging.path, "r") as sealed:
        for number in sorted(keep):
            part = Hdf5Sink(staging.parts / f"{ASIDE}{number}.h5")
            sealed.copy(f"parts/{number}", create_group(part.file, "parts"))
            part.close()
            disk.rename(staging.parts / f"{ASIDE}{number}.h5", staging.parts / f"{number}.h5")
        begun = Hdf5Sink(new)
        begun.attributes("parts", {})
        for name in sorted(set(sealed) - {"parts", "manifest"}):
            sealed.copy(name, begun.file)
        begun.attributes("", attributes)
        begun.close()
    disk.rename(new, staging.path)
