"""Write a Zarr store: begin it, publish its parts, seal it; every step ends in one rename."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from teachonce.store.containers.interface import OnDisk, SealContent, Sink, StoreSource
from teachonce.store.containers.zarr.tree import GROUP, ZarrSink, ZarrSource, shard_path
from teachonce.store.format.layout import groups_above, part_number, teacher_array
from teachonce.store.format.manifest import Entry, Part
from teachonce.support import files
from teachonce.support.arrays import Array

TEMPORARY = ".tmp-"
KEPT = ".kept"  # ending of a part that waits to replace another
LAST = ("index", "manifest")  # written when a store is sealed


class ZarrStaging(OnDisk):
    """A Zarr store under construction. See `teachonce.store.containers.interface.Staging`."""

    def __init__(self, path: Path) -> None:
        self.path, self.mark = path, ""

    @property
    def _new(self) -> Path:
        return self.path.parent / f".{self.path.name}.new-{self.mark}"

    def create(self) -> Sink:
        self.clear()
        sink = ZarrSink(self._new)
        sink.attributes("parts", {})
        return sink

    def begin(self) -> None:
        files.rename(self._new, self.path)

    def complete(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], lacking: set[str]
    ) -> None:
        work, entries = self.path / f"{TEMPORARY}{self.mark}-outside", dict(attributes["arrays"])
        sink = ZarrSink(work)
        for name, values in arrays:
            if name in lacking:
                fingerprint = sink.array(name, teacher_array(values), values)
                entries[name] = Entry.of(values, fingerprint).to_json()
        sink.close()
        for group in sorted(
            {"parts", *(above for name in entries for above in groups_above(name))}
        ):
            if not (self.path / group / "zarr.json").exists():
                (self.path / group).mkdir(parents=True, exist_ok=True)
                self._write_json(GROUP, self.path / group / "zarr.json")
        for name in sorted(lacking):
            files.rename(work / name, self.path / name)
        shutil.rmtree(work)
        if entries != attributes["arrays"]:  # another release wrote other metadata
            self._write_root(attributes | {"arrays": entries})

    def _write_json(self, node: dict[str, Any], target: Path) -> None:
        new = self.path / f"{TEMPORARY}{self.mark}-root"
        new.unlink(missing_ok=True)
        with os.fdopen(files.create(new), "wb") as file:
            file.write(json.dumps(node, indent=1).encode())
        files.sync(new)
        files.rename(new, target)

    def source(self) -> StoreSource:
        return ZarrSource(str(self.path))

    def clear(self, mark: str = "") -> None:
        files.discard(self.path.parent, f".{self.path.name}.new-{mark}")
        parts = self.path / "parts"
        for folder in (self.path,) if parts.is_symlink() else (parts, self.path):
            files.discard(folder, f"{TEMPORARY}{mark}")
            if folder.is_dir() and not (self.path / "zarr.json").exists():
                with contextlib.suppress(OSError):  # the store was removed while we wrote a part
                    folder.rmdir()

    def clear_part(self, number: int) -> None:
        if not (parts := self.path / "parts").is_symlink():
            files.discard(parts, TEMPORARY, f"-{number}")

    def _temporary(self, number: int) -> Path:
        return self.path / "parts" / f"{TEMPORARY}{self.mark}-{number}"

    def part(self, number: int) -> Sink:
        return ZarrSink(self._temporary(number))

    def publish(self, number: int) -> None:
        files.sync(self.path / "zarr.json")  # OSError if the store was removed meanwhile
        files.rename(self._temporary(number), self.path / "parts" / str(number))

    def adopt(self, number: int, folder: Path, part: Part) -> None:
        """Make the tree of a part of the files that another store has of it: its arrays alone, by
        hard links, or copies where there can be none."""
        sink = ZarrSink(self._temporary(number))
        for group in sorted({above for name in part.arrays for above in groups_above(name)}):
            sink.attributes(group, {})
        for name, entry in part.arrays.items():
            shard = [shard_path(name, entry.shape)] if all(entry.shape) else []
            for file in (f"{name}/zarr.json", *shard):
                files.link(folder / file, sink.folder / file)
        sink.attributes("", {"part": part.to_json()})
        sink.close()

    def keep(self, number: int) -> None:
        """Name a written part next to the part that it will replace."""
        files.rename(self._temporary(number), self._kept(number))

    def _kept(self, number: int) -> Path:
        return self.path / "parts" / f"{number}{KEPT}"

    def replace(self, numbers: Iterable[int], gone: Collection[int]) -> None:
        """Replace parts by those that `keep` has named, and remove the parts that are `gone`. After
        a kill another call continues."""
        for number in numbers:
            kept, old = self._kept(number), self.path / "parts" / str(number)
            if (kept.exists() or number in gone) and old.exists():
                files.rename(old, self.path / "parts" / f"{TEMPORARY}{self.mark}-{number}-old")
            if kept.exists():
                files.rename(kept, old)

    def drop_kept(self) -> None:
        """Remove the parts that `keep` has named if `replace` was never called."""
        files.discard(self.path / "parts", "", KEPT)

    def published(self) -> set[int]:
        numbers = (part_number(entry.name) for entry in (self.path / "parts").glob("*"))
        return {number for number in numbers if number is not None}

    def unseal(self, attributes: dict[str, Any]) -> None:
        """Make a sealed store an unfinished one, with these attributes of its root."""
        self._write_root(attributes)

    def _write_root(self, attributes: dict[str, Any]) -> None:
        self._write_json(GROUP | {"attributes": attributes}, self.path / "zarr.json")

    def seal(self, make: SealContent) -> None:
        work = self.path / f"{TEMPORARY}{self.mark}-manifest"
        attributes = ZarrSink(work).finish(make)
        for name in LAST:
            if (work / name).exists():
                shutil.rmtree(self.path / name, ignore_errors=True)
                files.rename(work / name, self.path / name)
        shutil.rmtree(work)
        self._write_root(attributes)
