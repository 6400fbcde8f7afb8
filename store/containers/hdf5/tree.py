"""Read the tree of a store from an HDF5 file, without HDF5's own library."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.disk_cache import DiskCache
from teachonce.store.containers.hdf5.blocks import Blocks
from teachonce.store.containers.hdf5.chunks import FLETCHER, Hdf5Slices, read_dataset
from teachonce.store.containers.hdf5.file import DIGEST_BYTES, file_digest, parts_folder
from teachonce.store.containers.hdf5.objects import HARD, Object, attributes, links, read_object
from teachonce.store.containers.interface import Flaw, groups_of, unknown_flaw
from teachonce.store.containers.memory_map import OpenFiles
from teachonce.store.containers.untrusted import MAX_JSON, Folder
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import part_of

GRAIN = 2**20  # bytes; chunks are decoded whole
MAX_DEPTH = 16  # of nested groups; a store has 6 levels
FILE_ALTERED = "the bytes of the file do not match the SHA-256 at its end"


class Hdf5File:
    """Reads the groups and datasets of one file. Raises Damage, OSError."""

    def __init__(self, path: str) -> None:
        self.blocks = Blocks(path)
        self._groups: dict[str, tuple[Object, dict[str, tuple[int, int]]]] = {}

    def find(self, name: str) -> Object:
        """Return the object at a path. Raises Damage if a link on the path is missing or not
        hard."""
        parent, _, last = name.rpartition("/")
        if not name:
            return self.group("")[0]
        steps = self.group(parent)[1]
        if last not in steps:
            raise Damage(f"there is no {name}")
        kind, address = steps[last]
        if kind != HARD:
            raise Damage(f"{name} is a link, which is not followed")
        return read_object(self.blocks, address)

    def group(self, name: str) -> tuple[Object, dict[str, tuple[int, int]]]:
        """Return the object of a group, and its links: name -> (kind, address). The result is
        cached."""
        if name not in self._groups:
            thing = self.find(name) if name else read_object(self.blocks, self.blocks.root)
            if thing.is_dataset:
                raise Damage(f"{name} is not a group")
            self._groups[name] = thing, links(self.blocks, thing)
        return self._groups[name]

    def attributes(self, name: str) -> dict[str, bytes | int | str]:
        """Return the attributes of a group; see `objects.attributes`."""
        return attributes(self.blocks, self.group(name)[0])

    def walk(self, top: str) -> Iterator[tuple[str, Object | None]]:
        """Yield (path, object) of each dataset at and under `top`, in the order of the file. The
        object is None for a soft or external link, which is not followed.

        Raises Damage if two paths lead to one object, if groups are nested too deeply, or if a
        group cannot be read.
        """
        todo, visited = [top], dict[int, str]()
        while todo:
            path = todo.pop()
            parent, _, last = path.rpartition("/")
            if path and self.group(parent)[1].get(last, (HARD,))[0] != HARD:
                yield path, None
                continue
            thing = self.find(path)
            # A hard link to a group above it would make the walk endless.
            if thing.address in visited:
                raise Damage(f"{path} is the same as {visited[thing.address]}")
            visited[thing.address] = path
            if thing.is_dataset:
                yield path, thing
            elif path.count("/") > MAX_DEPTH:
                raise Damage(f"{path} is more than {MAX_DEPTH} groups deep")
            else:
                names = reversed(self.group(path)[1])
                todo += [f"{path}/{name}".lstrip("/") for name in names]


def _read(values: dict[str, bytes | int | str], where: str) -> dict[str, Any]:
    """Decode attributes that `write_attributes` wrote. Raises StoreError, which names `where`.

    Attributes of types that no store has, such as a float of another program, are left out.
    """
    items: dict[str, Any] = {}
    for key, value in sorted(values.items()):  # the order in which a copy writes them again
        if isinstance(value, str):
            continue
        if isinstance(value, bytes) and len(value) > MAX_JSON:
            raise StoreError(f"{where}: attribute {key} is larger than {MAX_JSON:,} bytes")
        items[key] = text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        # A text that is not JSON is an unknown attribute, or refused where its object is needed.
        if isinstance(text, str) and text[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                items[key] = json.loads(text)
    return items


class Hdf5Source:
    """Reads an HDF5 store. Parts of an unfinished store are next to it, in `<path>.parts/`."""

    def __init__(self, path: str) -> None:
        self.path, self.address = path, str(Path(path).absolute())
        self.options: dict[str, Any] | None = None
        self.remote = False
        self.cache: DiskCache | None = None
        self.grain = GRAIN
        self._parts = Folder(str(parts_folder(self.address)))
        self._files = OpenFiles[Hdf5File]()

    def _file(self, name: str) -> Hdf5File:
        segments = name.split("/")
        if segments[0] == "parts" and len(segments) > 1 and self._has_folder():
            part = f"{segments[1]}.h5"
            self._parts.check(part)
            if Path(self._parts.root, part).is_file() and self._unfinished():
                return self._handle(Path(self._parts.root, part))
        return self._handle(Path(self.address))

    def _has_folder(self) -> bool:
        return os.path.isdir(self._parts.root) and not os.path.islink(self._parts.root)

    def _handle(self, path: Path) -> Hdf5File:
        try:
            return self._files.get(str(path), Hdf5File)
        except (Damage, OSError) as error:
            where = self.path if str(path) == self.address else path
            raise StoreError(
                f"{where}: not a readable HDF5 file, or not a feature store ({error})"
            ) from error

    def _unfinished(self) -> bool:
        """Return whether the store is unfinished: only then are the files in `NAME.h5.parts/` its
        parts."""
        try:
            return self._handle(Path(self.address)).attributes("").get("state") == b"writing"
        except (Damage, StoreError):
            return False

    def _damage(self, name: str, error: Damage) -> StoreError:
        return StoreError(
            f"{self.path}: {name or 'the root'} is missing or unreadable ({error}); the store is"
            " damaged"
        )

    def attributes(self, group: str = "") -> dict[str, Any]:
        try:
            values = self._file(group).attributes(group)
        except Damage as error:
            raise self._damage(group, error) from error
        return _read(values, f"{self.path}: {group}")

    def members(self, group: str) -> list[str]:
        folder = Path(self._parts.root)
        if group == "parts" and self._has_folder() and self._unfinished():
            return sorted(file.stem for file in folder.glob("*.h5"))
        try:
            return sorted(self._file(group).group(group)[1])
        except (Damage, StoreError):
            return []

    def array(self, name: str) -> Hdf5Slices:
        file, where = self._file(name), f"{self.path}: array {name}"
        try:
            thing = file.find(name)
        except Damage as error:
            raise self._damage(name, error) from error
        try:
            dataset = read_dataset(file.blocks, thing, where, is_json=name == "manifest")
        except Damage as error:
            raise StoreError(f"{where}: {error}; the store is damaged") from error
        return Hdf5Slices(file.blocks, dataset, where)

    def fingerprint(self, name: str) -> str | None:
        return None

    def use_cache(self, cache: DiskCache, checksum: str) -> None:
        """Do nothing: HDF5 stores are local files, so there are no fetched bytes to cache."""

    def announce(self, names: Iterable[str]) -> None:
        """Do nothing: HDF5 stores are local files, so reading ahead saves no requests."""

    def expect(self, *metadata: Any) -> None:
        """Do nothing: HDF5 stores are local files."""

    def forget(self, name: str) -> None:
        """Do nothing: nothing is cached."""

    def format_violation(self, name: str) -> str | None:
        dataset = self.array(name).dataset
        checked = 0 in dataset.shape or FLETCHER in dataset.filters
        return None if checked else "chunks without Fletcher-32"

    def flaws(
        self, arrays: Collection[str], group: str = "", parts: Container[int] = ()
    ) -> list[Flaw]:
        groups = groups_of(arrays, group)
        paths = {f"{path}/{name}".lstrip("/") for path in groups for name in self.members(path)}
        unknown = {path for path in paths - groups - set(arrays) if part_of(path) not in parts}
        flaws = [Flaw(f"missing array {name}", name) for name in sorted(set(arrays) - paths)]
        flaws += [unknown_flaw(name, "object") for name in sorted(unknown)]
        return flaws if group else [*flaws, *self._altered()]

    def _altered(self) -> Iterator[Flaw]:
        """Yield a flaw if any byte of the file was altered; see `Flaw.explained_by_unknown`."""
        path = Path(self.address)
        end = max(0, path.stat().st_size - DIGEST_BYTES)
        with path.open("rb") as file:
            file.seek(end)
            if file.read() != file_digest(path, end):
                yield Flaw(FILE_ALTERED, "", explained_by_unknown=True)

    def arrays(self, top: str = "") -> list[str]:
        """Return the paths of all arrays under a group, in the order of the file. Raises
        StoreError."""
        try:
            items = self._handle(Path(self.address)).walk(top)
            return [path for path, thing in items if thing is not None]
        except Damage as error:
            raise self._damage(top, error) from error

    def stored_bytes(self, name: str) -> int:
        """Return the number of bytes that an array takes in the file. Raises StoreError."""
        return self.array(name).dataset.stored

    def close(self) -> None:
        self._files.clear()
