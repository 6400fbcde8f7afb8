"""Read and write the tree of a store as Zarr v3, with one shard file for each array."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store.containers.disk_cache import DiskCache, FetchedBytes
from teachonce.store.containers.interface import (
    Flaw,
    SealContent,
    StoredSlices,
    groups_of,
    unknown_flaw,
)
from teachonce.store.containers.memory_map import OpenFiles
from teachonce.store.containers.network import (
    ABSENT,
    check_root_metadata,
    fetch_attempts,
    with_refetches,
)
from teachonce.store.containers.remote_ranges import ByteRange, RemoteRanges
from teachonce.store.containers.untrusted import MAX_JSON, check_size
from teachonce.store.containers.zarr.files import Files, LocalFiles, remote_files
from teachonce.store.containers.zarr.remote_shards import RUN, RemoteSlices
from teachonce.store.containers.zarr.shards import (
    GROUP,
    MappedShard,
    ShardSlices,
    array_node,
    format_violation,
    group_json,
    shard_layout,
    write_shard,
)
from teachonce.store.containers.zarr.zarr_python import ZarrSlices, open_slices
from teachonce.store.errors import StoreError, Unreachable
from teachonce.store.format.layout import ArraySpec, groups_above, teacher_array
from teachonce.store.format.manifest import Entry
from teachonce.support.arrays import Array
from teachonce.support.files import sync_tree

# 4096, the fewest rows that were tried, suit our own reader; zarr-python alone is faster with 16k
# or more.
TOKEN_ROWS = 4096
CHUNK_BYTES = 2**20
MAX_DIGESTS = 4096
BLOSC_GRAIN = 2**17  # the blocks of Blosc
REMOTE_GRAIN = 2**24  # a chunk of long rows is fetched whole


def _rows_and_node(name: str, spec: ArraySpec) -> tuple[int, bytes]:
    """Return the rows of a chunk, and the zarr.json, that this software writes for an array."""
    rows = spec.rows(TOKEN_ROWS, CHUNK_BYTES)
    # The indent is zarr-python's: `expect` compares the digest of these bytes with stored ones.
    return rows, json.dumps(array_node(name, spec, rows), indent=2).encode()


def shard_path(name: str, shape: tuple[int, ...]) -> str:
    """Return the path of the shard file of an array."""
    return f"{name}/c" + "/0" * len(shape)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unknown_files(listed: set[str], expected: set[str], broken: set[str]) -> list[Flaw]:
    """Return a flaw for each file or whole folder that the format does not define. Arrays in
    `broken` are skipped: they cannot be opened, so the files that they should have are unknown."""
    folders = {"", *broken, *(folder for file in expected for folder in groups_above(file))}
    tops = set()
    for file in listed - expected - folders:
        if broken.isdisjoint(groups_above(file)):
            tops.add(next(path for path in (*groups_above(file), file) if path not in folders))
    return [unknown_flaw(top, "file" if top in listed else "folder") for top in sorted(tops)]


class ZarrSink:
    """Writes groups and arrays under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._groups: set[str] = set()
        self._threads = ThreadPoolExecutor()
        self.attributes("", {})

    def attributes(self, group: str, values: dict[str, Any]) -> None:
        target = self.folder / group / "zarr.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(group_json(values))
        self._groups.add(group)

    def array(self, name: str, values: Array, spec: ArraySpec | None = None) -> str | None:
        spec = spec or teacher_array(values)
        for group in groups_above(name):
            if group not in self._groups:
                self.attributes(group, {})
        rows, node = _rows_and_node(name, spec)
        target = self.folder / name / "zarr.json"
        target.parent.mkdir()
        target.write_bytes(node)
        if values.size:
            shard = self.folder / shard_path(name, spec.shape)
            shard.parent.mkdir(parents=True)
            write_shard(shard, spec, rows, values, self._threads)
        return _digest(node)

    def finish(self, make: SealContent) -> dict[str, Any]:
        """Write the index and the manifest of a store, and close; returns the attributes of its
        root."""
        attributes, manifest = make(self.array)
        self.array("manifest", np.frombuffer(manifest, np.uint8))
        self.close()
        return attributes

    def finish_missing(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], missing: set[str]
    ) -> dict[str, Any]:
        """Write the arrays named in `missing`, and close; returns `attributes` of the root with
        their entries. See `Staging.complete`."""
        entries = dict(attributes["arrays"])
        for name, values in arrays:
            # `arrays` yields stored arrays as well, because HDF5 writes these again.
            if name in missing:
                entries[name] = Entry.of(values, self.array(name, values)).to_json()
        self.close()
        return attributes | {"arrays": entries}

    def close(self) -> None:
        self._threads.shutdown()
        # Without the sync, a crash after the caller's rename could leave a part with empty files.
        sync_tree(self.folder)


class ZarrSource:
    """Reads a Zarr store from a folder or from any URL that fsspec supports.

    zarr-python reads arrays in a layout that FORMAT.md does not define. `ranges` is None for a
    local store; a remote one has no maps.
    """

    def __init__(self, path: str, storage_options: dict[str, Any] | None = None) -> None:
        self.path, self.options = path, storage_options
        self.remote = "://" in path
        self.address = path if self.remote else str(Path(path).absolute())
        self.grain = REMOTE_GRAIN if self.remote else BLOSC_GRAIN
        self.maps = OpenFiles[MappedShard]()
        self.ranges: RemoteRanges | None = None
        self.cache: DiskCache | None = None
        self._digests: dict[str, str] = {}
        if self.remote:
            files = remote_files(self.address, storage_options)
            self._files: Files = files
            self.ranges = RemoteRanges(files)
        else:
            self._files = LocalFiles(self.address)

    def use_cache(self, cache: DiskCache, checksum: str) -> None:
        """Cache the bytes that are read over a network on a local disk; see `StoreSource`."""
        self.cache = cache
        if self.ranges is not None:
            self.ranges.use_cache(cache, checksum)

    def forget(self, name: str) -> None:
        """Drop the cached bytes of an array that was found damaged, so that it is fetched again."""
        if self.ranges is not None:
            # The number of dimensions is unknown here: the metadata may be what is damaged.
            shards = (shard_path(name, (1,) * n) for n in (1, 2, 3, 4))
            self.ranges.forget(f"{name}/zarr.json", *shards)

    def bytes(self, name: str) -> bytes | None:
        """Read a whole small file; return None if it is missing. Raises StoreError if it cannot be
        read or has more than MAX_JSON bytes."""
        try:
            # The root is never cached: its checksum is the cache's key, and sealing changes it.
            if self.ranges is None or "/" not in name:
                return self._files.read(name)
            byte_range = ByteRange(name, 0, MAX_JSON)  # `announce` requests the same range
            piece = self.ranges.get(byte_range)
            self.ranges.release(byte_range)
        except ABSENT:
            return None
        except OSError as error:
            raise StoreError(f"{self.path}: {name} cannot be read ({error})") from error
        if piece.whole > MAX_JSON:
            raise StoreError(f"{self.path}: {name} is larger than {MAX_JSON:,} bytes")
        return piece.data.tobytes()

    def _node(self, name: str) -> dict[str, Any]:
        file = f"{name}/zarr.json".lstrip("/")
        data = self.bytes(file)
        if self.remote:
            check_root_metadata(self.path, file, data)
        if data is None:
            raise StoreError(f"{self.path}: {file} is missing")
        if len(self._digests) > MAX_DIGESTS:
            self._digests = {}
        # `fingerprint` returns the digest of the bytes that are parsed here, without another read.
        self._digests[name] = _digest(data)
        try:
            node = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path}: {file} is not JSON ({error})") from error
        if not isinstance(node, dict) or node.get("zarr_format") != 3:
            raise StoreError(f"{self.path}: {file} is not Zarr format 3")
        return node

    def attributes(self, group: str = "") -> dict[str, Any]:
        attributes = with_refetches(self.remote, lambda: self._node(group)).get("attributes", {})
        if not isinstance(attributes, dict):
            raise StoreError(f"{self.path}: attributes of '{group}/' are not a JSON object")
        return attributes

    def members(self, group: str) -> list[str]:
        try:
            names = set(self._files.members(group))
        except ABSENT:
            return []
        return sorted(name for name in names if name != "zarr.json" and name[:1] != ".")

    def announce(self, names: Iterable[str]) -> None:
        if self.ranges is not None:
            for name in names:
                self.ranges.prefetch(ByteRange(f"{name}/zarr.json", 0, MAX_JSON))
                # `remote_shards` requests the same range first for a small array.
                self.ranges.prefetch(ByteRange(shard_path(name, (1,)), 0, RUN))

    def expect(self, group: str, name: str, spec: ArraySpec, fingerprint: str) -> None:
        if self.ranges is not None:
            _, node = _rows_and_node(name, spec)
            if _digest(node) == fingerprint:
                byte_range = ByteRange(f"{group}/{name}/zarr.json", 0, MAX_JSON)
                data = np.frombuffer(node, np.uint8)
                self.ranges.put(byte_range, FetchedBytes(data, len(node), set()))

    def array(self, name: str) -> StoredSlices:
        return with_refetches(self.remote, lambda: self._array(name), lambda: self.forget(name))

    def _array(self, name: str) -> StoredSlices:
        node, where = self._node(name), f"{self.path}: array {name}"
        layout = shard_layout(node) or open_slices(self.address, name, node, where)
        shard, stored = shard_path(name, layout.shape), 0
        # A missing shard is damage, for which zarr-python would return the fill value.
        try:
            if isinstance(layout, ZarrSlices):
                array: StoredSlices = layout
                if self.ranges is not None and all(layout.shape):
                    layout.read_from(self.ranges, shard, self._files.size(shard))
            elif self.ranges is not None:
                array = RemoteSlices(self.ranges, shard, layout, where)
                stored = array.size
            else:
                mapped = partial(MappedShard, layout=layout)
                opened = partial(self.maps.get, f"{self.address}/{shard}", mapped)
                array = ShardSlices(layout, where, opened)
            if all(layout.shape):
                stored = stored or self._files.size(shard)
        except OSError as error:
            # The text of a missing object is the whole answer of the server.
            problem = "is missing" if isinstance(error, ABSENT) else f"cannot be read ({error})"
            raise StoreError(f"{where}: its file {shard} {problem}") from error
        decoded = prod(layout.shape) * layout.dtype.itemsize
        if decoded:
            check_size(where, decoded, layout.chunk_bytes, stored, is_json=name == "manifest")
        return array

    def fingerprint(self, name: str) -> str | None:
        """Return the checksum of the metadata with which the array was last opened; None if they
        are missing."""
        if (digest := self._digests.pop(name, None)) is not None:
            return digest
        data = self.bytes(f"{name}/zarr.json")
        return None if data is None else _digest(data)

    def files(self, arrays: Collection[str], group: str = "") -> tuple[set[str], set[str]]:
        """Return the paths of the files of a group with these arrays, and the arrays that cannot be
        opened. For an array that cannot be opened, only zarr.json is included."""
        paths, broken = groups_of(arrays, group).union(arrays), set[str]()
        files = {f"{path}/zarr.json".lstrip("/") for path in paths}
        for name in arrays:
            try:
                shape = self.array(name).shape
            except StoreError:
                broken.add(name)
                continue
            if all(shape):
                files.add(shard_path(name, shape))
        return files, broken

    def flaws(
        self, arrays: Collection[str], group: str = "", parts: Container[int] = ()
    ) -> list[Flaw]:
        expected, broken = self.files(arrays, group)
        listed, always = self._listed(expected, group, parts)
        missing = sorted(name for name in expected - listed if not self._linked(name))
        flaws = [Flaw(f"missing file {name}", name.rpartition("/")[0]) for name in missing]
        flaws += _unknown_files(always, expected, broken)
        for inner in sorted(groups_of(arrays, group)):
            file = f"{inner}/zarr.json".lstrip("/")
            # Attributes are not compared, because the root and every part have their own.
            if file in listed and not self._holds(
                inner, lambda node: {**node, "attributes": {}} == GROUP
            ):
                flaws.append(Flaw(f"altered file {file}", inner))
        # No checksum covers the metadata of the manifest.
        if (
            "manifest" in arrays
            and "manifest/zarr.json" in listed
            and not self._holds("manifest", lambda node: format_violation(node, "manifest") is None)
        ):
            flaws.append(Flaw("altered file manifest/zarr.json", "manifest"))
        return flaws

    def _listed(
        self, expected: set[str], group: str, parts: Container[int]
    ) -> tuple[set[str], set[str]]:
        """List the files under a group. Return the paths in any listing, and the paths in all
        listings.

        A remote server may list incompletely: the files are listed again until a listing equals
        `expected`. Raises Unreachable for a server that lists nothing, as many web servers do.
        """
        listed = always = self._files.under(group, parts)
        for _ in fetch_attempts(self.remote)[1:]:
            if listed == always == expected:
                break
            again = self._files.under(group, parts)
            listed, always = listed | again, always & again
        if self.remote and not listed and not group:  # the root itself has been read
            raise Unreachable(
                f"{self.path}: cannot be verified there: the server does not list its files; copy"
                " the store to a disk with `feature-store convert`, and verify the copy"
            )
        return listed, always

    def _linked(self, name: str) -> bool:
        """Return whether a name in a local store, which may be a link, leads to a file inside
        it."""
        try:
            return not self.remote and self._files.size(name) >= 0
        except (OSError, StoreError):  # the link leads nowhere, or out of the store
            return False

    def _holds(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> bool:
        """Return whether the metadata of a group or array meet a condition, at the first attempt to
        read them or later."""
        for _ in fetch_attempts(self.remote):
            with suppress(StoreError):
                if condition(self._node(name)):
                    return True
        return False

    def format_violation(self, name: str) -> str | None:
        return with_refetches(
            self.remote,
            lambda: format_violation(self._node(name), name),
            lambda: self.forget(name),
        )

    def close(self) -> None:
        if self.ranges is not None:
            self.ranges.close()
        self.maps.clear()
