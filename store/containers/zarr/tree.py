"""Read and write the tree of a store as Zarr v3, with one shard file for each array."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import FsspecStore, LocalStore

from store.containers.interface import Flaw, Slices
from store.containers.untrusted import MAX_JSON, Folder, check_size, files_under
from store.containers.zarr.metadata import unlawful
from store.containers.zarr.shards import ShardMaps, ShardSlices, layout_of
from store.containers.zarr.zarr_python import check_codecs, open_slices
from store.errors import StoreError
from store.format.dimensions import dimension_names
from store.format.layout import ArraySpec, groups_above, part_number
from support.arrays import Array
from support.files import sync_tree

TOKEN_ROWS = 4096
CHUNK_BYTES = 2**20
GROUP = {"attributes": {}, "zarr_format": 3, "node_type": "group"}


def _compressors(spec: ArraySpec) -> list[BytesBytesCodec]:
    if spec.packing is None:
        return [Crc32cCodec()]
    blosc: dict[str, Any] = spec.packing._asdict()
    return [BloscCodec(**blosc, typesize=spec.dtype.itemsize), Crc32cCodec()]


def _create(store: Any, name: str, spec: ArraySpec) -> zarr.Array[Any]:
    rows = spec.rows(TOKEN_ROWS, CHUNK_BYTES)
    shard = -(-max(1, spec.shape[0]) // rows) * rows
    row = tuple(max(1, size) for size in spec.shape[1:])
    return zarr.create_array(
        store,
        name=name,
        shape=spec.shape,
        dtype=spec.dtype,
        chunks=(rows, *row),
        shards=(shard, *row),
        compressors=_compressors(spec),
        filters=None,
        fill_value=0,
        dimension_names=dimension_names(name, len(spec.shape)),
        config={"write_empty_chunks": True},
    )


def _shard(name: str, shape: tuple[int, ...]) -> str:
    """The path of the shard file of an array."""
    return f"{name}/c" + "/0" * len(shape)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _above(file: str) -> str:
    return file.rpartition("/")[0]


def _strangers(found: set[str], expected: set[str], broken: set[str]) -> list[Flaw]:
    """A flaw for each file or whole folder that does not belong; none in arrays that cannot be
    opened, as what these should hold is not known."""
    folders = {"", *broken, *(folder for file in expected for folder in groups_above(file))}
    tops = set()
    for file in found - expected - folders:
        if broken.isdisjoint(groups_above(file)):
            tops.add(next(path for path in (*groups_above(file), file) if path not in folders))
    return [Flaw(_named(top, top in found), top, stranger=True) for top in sorted(tops)]


def _named(top: str, is_file: bool) -> str:
    if (number := part_number(top.removeprefix("parts/"))) is not None and not is_file:
        return f"extra part {number}, which is not in the manifest"
    return f"extra {'file' if is_file else 'folder'} {top}"


class ZarrSink:
    """Writes groups and arrays under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.store = LocalStore(folder)
        self._groups: set[str] = set()
        self.attributes("", {})

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        target = self.folder / group / "zarr.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(GROUP | {"attributes": values}, indent=1), "utf-8")
        self._groups.add(group)

    def array(self, name: str, spec: ArraySpec, values: Array) -> str | None:
        parents = name.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            group = "/".join(parents[:depth])
            if group not in self._groups:
                self.attributes(group, {})
        array = _create(self.store, name, spec)
        if values.size:
            array[...] = np.ascontiguousarray(values)
        return _digest((self.folder / name / "zarr.json").read_bytes())

    def close(self) -> None:
        sync_tree(self.folder)


class ZarrSource:
    """Reads a Zarr store from a folder or from anything fsspec knows.

    `maps` is None where zarr-python does all the reading: for stores that are not a local folder.
    """

    def __init__(self, path: str, storage_options: dict[str, Any] | None = None) -> None:
        self.path, self.options = path, storage_options
        self.maps = None if "://" in path else ShardMaps()
        self._folder = None if "://" in path else Folder(path)
        self._digests: dict[str, str] = {}
        try:
            if "://" in path:
                self._store: Any = FsspecStore.from_url(
                    path, storage_options=storage_options, read_only=True
                )
            else:
                self._store = LocalStore(path, read_only=True)
            self._fs, self._root = fsspec.core.url_to_fs(path, **(storage_options or {}))
        except (ImportError, ValueError) as error:
            raise StoreError(f"{path}: cannot be opened ({error})") from error

    def _address(self, name: str, limit: int | None = None) -> str:
        if self._folder is not None:
            self._folder.check(name, limit)
        return f"{self._root.rstrip('/')}/{name}"

    def bytes(self, name: str) -> bytes | None:
        """Read a whole small file; None if there is none."""
        try:
            address = self._address(name, MAX_JSON)
            if self._folder is None and (self._fs.size(address) or 0) > MAX_JSON:
                raise StoreError(f"{self.path}: {name} is larger than {MAX_JSON:,} bytes")
            return bytes(self._fs.cat_file(address))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.path}: {name} cannot be read ({error})") from error

    def has(self, name: str) -> bool:
        return bool(self._fs.exists(self._address(name)))

    def _node(self, name: str) -> dict[str, Any]:
        file = f"{name}/zarr.json".lstrip("/")
        data = self.bytes(file)
        if data is None:
            raise StoreError(f"{self.path}: {file} is missing")
        self._digests[name] = _digest(data)
        try:
            node = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path}: {file} is not JSON ({error})") from error
        if not isinstance(node, dict) or node.get("zarr_format") != 3:
            raise StoreError(f"{self.path}: {file} is not Zarr format 3")
        return node

    def attributes(self, group: str = "") -> dict[str, Any]:
        attributes = self._node(group).get("attributes", {})
        if not isinstance(attributes, dict):
            raise StoreError(f"{self.path}: attributes of '{group}/' are not a JSON object")
        return attributes

    def members(self, group: str) -> list[str]:
        try:
            found = self._fs.ls(f"{self._root.rstrip('/')}/{group}", detail=False)
        except FileNotFoundError:
            return []
        names = {str(path).rstrip("/").rsplit("/", 1)[-1] for path in found}
        return sorted(name for name in names if name != "zarr.json" and name[:1] != ".")

    def array(self, name: str) -> Slices:
        array, chunk = self._mapped(name) or self._by_zarr(name)
        shard, where = _shard(name, array.shape), f"{self.path}: array {name}"
        if all(array.shape):
            try:
                stored = int(self._fs.size(self._address(shard)))
            except OSError as error:
                message = f"{where}: its file {shard} is missing ({error})"
                raise StoreError(message) from error
            decoded = prod(array.shape) * array.dtype.itemsize
            check_size(where, decoded, chunk, stored, is_json=name == "manifest")
        return array

    def _mapped(self, name: str) -> tuple[Slices, int] | None:
        """Open an array of a local folder in our own reader, with the bytes of a decoded chunk;
        None if zarr-python must read it."""
        if self.maps is None:
            return None
        try:
            layout = layout_of(self._node(name))
        except StoreError:
            return None  # zarr-python says what is wrong with it
        if layout is None:
            return None
        file = Path(self.path) / _shard(name, layout.shape)
        slices = ShardSlices(self.maps, file, layout, f"{self.path}: array {name}")
        return slices, layout.rows * layout.row_bytes

    def _by_zarr(self, name: str) -> tuple[Slices, int]:
        where = f"{self.path}: array {name}"
        check_codecs(self._node(name), where)
        try:
            return open_slices(self._store, name, where)
        except Exception as error:  # zarr raises many kinds for damaged metadata
            raise StoreError(f"{where} cannot be opened ({error}); the store is damaged") from error

    def fingerprint(self, name: str) -> str | None:
        """Checksum of the metadata that the array was last opened with."""
        if (digest := self._digests.pop(name, None)) is not None:
            return digest
        data = self.bytes(f"{name}/zarr.json")
        return None if data is None else _digest(data)

    def files(self, arrays: Collection[str]) -> tuple[set[str], set[str]]:
        """Paths of the files of a store that has these arrays; and the arrays that cannot be
        opened, of whose files only zarr.json is among them."""
        files, broken = {"zarr.json"}, set()
        for name in arrays:
            files.update(f"{group}/zarr.json" for group in (*groups_above(name), name))
            try:
                shape = self.array(name).shape
            except StoreError:
                broken.add(name)
                continue
            if all(shape):
                files.add(_shard(name, shape))
        return files, broken

    def flaws(self, arrays: Collection[str]) -> list[Flaw]:
        root = self._root.rstrip("/")
        if "://" in self.path:
            found = {str(path)[len(root) :].lstrip("/") for path in self._fs.find(root)}
        else:
            found = set(files_under(self.path))
        expected, broken = self.files(arrays)
        missing = sorted(name for name in expected - found if not self._linked(name))
        flaws = [Flaw(f"missing file {name}", _above(name)) for name in missing]
        flaws += _strangers(found, expected, broken)
        for group in sorted({"", *(group for name in arrays for group in groups_above(name))}):
            file = f"{group}/zarr.json".lstrip("/")
            if file in found and not self._same(group, GROUP):
                flaws.append(Flaw(f"altered file {file}", group))
        # No checksum covers the metadata of the manifest.
        if "manifest" in arrays and "manifest/zarr.json" in found and self._manifest_altered():
            flaws.append(Flaw("altered file manifest/zarr.json", "manifest"))
        return flaws

    def _linked(self, name: str) -> bool:
        """Whether a file is there, in a folder that is a link within the store."""
        try:
            return self._folder is not None and self.has(name)
        except StoreError:  # the link leads out of the store
            return False

    def _same(self, name: str, expected: dict[str, Any]) -> bool:
        try:
            node = self._node(name)
        except StoreError:
            return False
        return {**node, "attributes": {}} == expected

    def _manifest_altered(self) -> bool:
        try:
            return self.unlawful("manifest") is not None
        except StoreError:
            return True

    def unlawful(self, name: str) -> str | None:
        return unlawful(self._node(name), name)

    def damaged_chunks(self, name: str) -> list[int]:
        array = self.array(name)  # StoreError for what must not even be opened
        chunks = zarr.open_array(self._store, path=name, mode="r", zarr_format=3).chunks
        bad = []
        for number, begin in enumerate(range(0, array.shape[0], chunks[0])):
            try:
                array.read(begin, min(begin + chunks[0], array.shape[0]))
            except StoreError:
                bad.append(number)
        return bad

    def close(self) -> None:
        if self.maps is not None:
            self.maps.clear()
