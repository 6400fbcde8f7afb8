"""How a Zarr store is begun, gets its parts, and is sealed: every step ends in one rename."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from store import disk
from store.layout import ArraySpec
from store.tree import Array, Sink, Source
from store.zarr_tree import GROUP, ZarrSink, ZarrSource

TEMPORARY = ".tmp-"


class ZarrStaging:
    """A Zarr store under construction. See `store.tree.Staging`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new = path.parent / f".{path.name}.new"

    def create(self) -> Sink:
        shutil.rmtree(self._new, ignore_errors=True)
        sink = ZarrSink(self._new)
        sink.attributes("parts", {})
        return sink

    def begin(self) -> None:
        disk.rename(self._new, self.path)

    def source(self) -> Source:
        return ZarrSource(str(self.path))

    def lock(self) -> None:
        disk.lock(self.path)

    def unlock(self) -> None:
        disk.unlock(self.path)

    def _temporary(self, number: int) -> Path:
        return self.path / "parts" / f"{TEMPORARY}{number}"

    def part(self, number: int) -> Sink:
        self.withdraw(number)
        return ZarrSink(self._temporary(number))

    def publish(self, number: int) -> None:
        disk.rename(self._temporary(number), self.path / "parts" / str(number))

    def withdraw(self, number: int) -> None:
        shutil.rmtree(self._temporary(number), ignore_errors=True)

    def published(self) -> set[int]:
        for folder in (self.path, self.path / "parts"):
            for leftover in folder.glob(f"{TEMPORARY}*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return {int(entry.name) for entry in (self.path / "parts").iterdir() if entry.is_dir()}

    def seal(self, attributes: dict[str, Any], manifest: ArraySpec, values: Array) -> None:
        shutil.rmtree(self.path / "manifest", ignore_errors=True)
        work = self.path / f"{TEMPORARY}manifest"
        sink = ZarrSink(work)
        sink.array("manifest", manifest, values)
        sink.close()
        disk.rename(work / "manifest", self.path / "manifest")
        shutil.rmtree(work)
        root = self.path / f"{TEMPORARY}root"
        root.write_text(json.dumps(GROUP | {"attributes": attributes}, indent=1), "utf-8")
        disk.sync(root)
        disk.rename(root, self.path / "zarr.json")
