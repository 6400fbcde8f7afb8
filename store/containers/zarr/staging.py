"""Write a Zarr store: create it, publish its parts, seal it. Every step ends with one rename."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from teachonce.store.containers.interface import OnDisk, SealContent, Sink, StoreSource, groups_of
from teachonce.store.containers.zarr.shards import group_json
from teachonce.store.containers.zarr.tree import ZarrSink, ZarrSource, shard_path
from teachonce.store.format.layout import groups_above, part_numbers_in
from teachonce.store.format.manifest import Part
from teachonce.support import files
from teachonce.support.arrays import Array

TEMPORARY = ".tmp-"
REPLACEMENT = ".kept"  # suffix of a part that is to replace another one (FORMAT.md, section 9)
LAST = ("index", "manifest")  # written when a store is sealed


class ZarrStaging(OnDisk):
    """Writes a Zarr store. See `teachonce.store.containers.interface.Staging`."""

    def create(self) -> Sink:
        self.clear()
        return ZarrSink(self._new)

    def begin(self) -> None:
        files.rename(self._new, self.path)

    def complete(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], missing: set[str]
    ) -> None:
        work = self.path / f"{TEMPORARY}{self.mark}-outside"
        updated = ZarrSink(work).finish_missing(attributes, arrays, missing)
        # Groups come before arrays, because a rename requires the folder above its target.
        for group in sorted(groups_of(updated["arrays"]) - {""}):
            if not (self.path / group / "zarr.json").exists():
                (self.path / group).mkdir(parents=True, exist_ok=True)
                files.write(self.path / group / "zarr.json", group_json({}))
        for name in sorted(missing):
            files.rename(work / name, self.path / name)
        shutil.rmtree(work)
        if updated != attributes:  # another release of zarr writes other metadata
            self.replace_root(updated)

    def source(self) -> StoreSource:
        return ZarrSource(str(self.path))

    def clear(self, mark: str = "") -> None:
        files.discard(self.path.parent, f".{self.path.name}.new-{mark}")
        parts = self.path / "parts"
        # A link may lead anywhere. `parts` comes first, as only an empty folder can be removed.
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
        """Make the tree of a part from the files of another store's part: hard links, or copies on
        a disk without links. Only files of its arrays are taken."""
        sink = ZarrSink(self._temporary(number))
        for group in sorted({above for name in part.arrays for above in groups_above(name)}):
            sink.attributes(group, {})
        for name, entry in part.arrays.items():
            shard = [shard_path(name, entry.shape)] if all(entry.shape) else []
            for file in (f"{name}/zarr.json", *shard):
                files.link(folder / file, sink.folder / file)
        sink.attributes("", {"part": part.to_json()})
        sink.close()

    def stage_replacement(self, number: int) -> None:
        """Rename a written part to `<number>.kept`, next to the part that it will replace."""
        files.rename(self._temporary(number), self._replacement(number))

    def _replacement(self, number: int) -> Path:
        return self.path / "parts" / f"{number}{REPLACEMENT}"

    def replace(self, numbers: Iterable[int], removed: Collection[int]) -> None:
        """Replace parts by their staged replacements, and remove the parts in `removed`.

        After a kill, another call continues.
        """
        for number in numbers:
            new, old = self._replacement(number), self.path / "parts" / str(number)
            # After a kill, `old` may be the replacement already, which must stay.
            if (new.exists() or number in removed) and old.exists():
                files.rename(old, self.path / "parts" / f"{TEMPORARY}{self.mark}-{number}-old")
            if new.exists():
                files.rename(new, old)

    def discard_replacements(self) -> None:
        """Remove staged replacements for which `replace` was never called."""
        files.discard(self.path / "parts", "", REPLACEMENT)

    def published(self) -> set[int]:
        return part_numbers_in(entry.name for entry in (self.path / "parts").glob("*"))

    def replace_root(self, attributes: dict[str, Any]) -> None:
        """Replace the attributes of the root, which may mark a sealed store as unfinished."""
        files.write(self.path / "zarr.json", group_json(attributes))

    def seal(self, make: SealContent) -> None:
        work = self.path / f"{TEMPORARY}{self.mark}-manifest"
        attributes = ZarrSink(work).finish(make)
        for name in LAST:
            if (work / name).exists():
                # A rename cannot replace a folder that has files.
                shutil.rmtree(self.path / name, ignore_errors=True)
                files.rename(work / name, self.path / name)
        shutil.rmtree(work)
        # Last: for readers, the store is sealed if its root is (FORMAT.md, section 9).
        self.replace_root(attributes)
