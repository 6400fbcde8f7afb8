"""Write an HDF5 store: create it, publish its parts as files next to it, seal all into one file."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from teachonce.store.containers.hdf5.file import (
    Hdf5Sink,
    append_digest,
    create_group,
    parts_folder,
)
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.interface import OnDisk, SealContent, Sink, StoreSource
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import part_numbers_in
from teachonce.support import files
from teachonce.support.arrays import Array

TEMPORARY = ".tmp-"
OUTSIDE = {"calibration", "teacher"}  # groups outside the parts


def _check(path: Path) -> None:
    """Raise StoreError unless our own reader can read every object of a file."""
    # Callers check a file before HDF5 copies its objects: a crafted file crashes HDF5's library.
    source = Hdf5Source(str(path))
    for name in source.arrays():
        source.stored_bytes(name)


def write_unfinished(
    path: Path, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]]
) -> None:
    """Write the file of an unfinished store: its root and the arrays outside its parts."""
    with Hdf5Sink(path) as sink:
        sink.attributes("parts", {})
        for name, values in arrays:
            sink.array(name, values)
        sink.attributes("", attributes)


class Hdf5Staging(OnDisk):
    """Writes an HDF5 store. See `teachonce.store.containers.interface.Staging`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.parts = parts_folder(path)

    def create(self) -> Sink:
        self.clear()
        return Hdf5Sink(self._new)

    def begin(self) -> None:
        # The folder comes first, so that a store whose file exists can take parts.
        self.parts.mkdir(exist_ok=True)
        files.rename(self._new, self.path)

    def complete(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], missing: set[str]
    ) -> None:
        self.parts.mkdir(exist_ok=True)
        if not missing:
            return
        # All arrays go to a new file, because HDF5 cannot change a file in one atomic step.
        write_unfinished(self._new, attributes, arrays)
        files.rename(self._new, self.path)

    def source(self) -> StoreSource:
        return Hdf5Source(str(self.path))

    def clear(self, mark: str = "") -> None:
        files.discard(self.path.parent, f".{self.path.name}.new-{mark}")
        if not self.parts.is_symlink():  # it may lead anywhere
            files.discard(self.parts, f"{TEMPORARY}{mark}")

    def clear_part(self, number: int) -> None:
        if not self.parts.is_symlink():
            files.discard(self.parts, TEMPORARY, f"-{number}.h5")

    def _temporary(self, number: int) -> Path:
        return self.parts / f"{TEMPORARY}{self.mark}-{number}.h5"

    def part(self, number: int) -> Sink:
        return Hdf5Sink(self._temporary(number), prefix=f"parts/{number}")

    def publish(self, number: int) -> None:
        files.sync(self.path)  # OSError if the store was removed meanwhile
        files.rename(self._temporary(number), self.parts / f"{number}.h5")

    def published(self) -> set[int]:
        if self.parts.is_symlink():
            raise StoreError(
                f"{self.parts}: is a symbolic link, which is not followed; replace the link by the"
                " folder itself"
            )
        return part_numbers_in(file.stem for file in self.parts.glob("*.h5"))

    def seal(self, make: SealContent) -> None:
        with Hdf5Sink(self._new) as sink:
            attributes, manifest = make(sink.array)
            sink.attributes("", attributes)
            sink.array("manifest", np.frombuffer(manifest, np.uint8))
            _check(self.path)
            with h5py.File(self.path, "r") as unsealed:
                for name in sorted(OUTSIDE & set(unsealed)):  # unknown objects are not copied
                    unsealed.copy(name, sink.file)
                    sink.check()
            create_group(sink.file, "parts")
            # Parts are sorted, so that the bytes do not depend on the order of publishing.
            for number in sorted(self.published()):
                _check(self.parts / f"{number}.h5")
                with h5py.File(self.parts / f"{number}.h5", "r") as part:
                    part.copy(f"parts/{number}", sink.file["parts"])
                    # If the disk is full, all later writes are dropped, so the other parts need not
                    # be copied.
                    sink.check()
        # A sealed file ends with its SHA-256 (FORMAT.md, section 3), so it is appended before the
        # rename.
        append_digest(self._new)
        files.rename(self._new, self.path)
        # Until the rename, these files are the only copy of the parts.
        self.clean()

    def clean(self) -> None:
        """Remove the parts of a sealed store; unknown files and the target of a link remain."""
        if self.parts.is_symlink():
            return
        with suppress(OSError):  # there may be no such folder
            for number in self.published():
                (self.parts / f"{number}.h5").unlink()
            self.parts.rmdir()
