"""Write a store into a bucket, where nothing can be renamed.

Each part is made in a local folder, as for a store on a disk, and then uploaded. A group counts as
written when its own zarr.json exists, which is uploaded last: the zarr.json of a part publishes the
part, the root's starts the store, and the root's with the manifest's checksum seals it. An
incomplete upload does not count; the next process that holds the lease of the store removes its
objects.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from teachonce.store.containers.bucket import Bucket
from teachonce.store.containers.bucket_lease import BucketLease, check_free
from teachonce.store.containers.interface import SealContent, Sink, StoreSource, groups_of
from teachonce.store.containers.zarr.shards import group_json
from teachonce.store.containers.zarr.staging import LAST
from teachonce.store.containers.zarr.tree import ZarrSink, ZarrSource
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import part_numbers_in
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.lease import Lease

ROOT, STARTED = "zarr.json", ".tmp-begun"


class BucketStaging:
    """Writes a Zarr store into a bucket. See `interface.Staging`."""

    def __init__(self, url: str) -> None:
        self.path, self.mark = url.rstrip("/"), ""
        self._bucket = Bucket(self.path)
        # All local folders for this URL share this prefix, so that `clear` finds those of killed
        # processes.
        self._folders = f"teachonce-{hashlib.sha256(self.path.encode()).hexdigest()[:16]}-"

    def exists(self) -> bool:
        return self._bucket.has_all([ROOT]) == [True]

    def check_place(self) -> None:
        """Raise UserError unless a store can be created here."""
        names = self._bucket.names()
        # STARTED shows that an earlier start was killed: `clear` removes its objects.
        if names and not {ROOT, STARTED} & set(names):
            raise UserError(
                f"{self.path}: holds objects that are not a store ({', '.join(sorted(names)[:3])});"
                f" {ANOTHER}"
            )

    def check_free(self) -> None:
        check_free(self.path)

    def lease(self, held: Lease | None = None) -> Lease | BucketLease:
        lease = held or BucketLease(self.path)
        self.mark = lease.token
        return lease

    def _work(self, purpose: str) -> Path:
        """Return the local folder in which the files for `purpose` (such as a part) are made before
        they are uploaded."""
        return Path(tempfile.gettempdir()) / f"{self._folders}{self.mark}-{purpose}"

    def clear(self, mark: str = "") -> None:
        with suppress(OSError):  # a folder of another user
            files.discard(Path(tempfile.gettempdir()), f"{self._folders}{mark}")
        # If a mark is given, only local files are removed: this writer may have lost its lease, and
        # the objects of an incomplete part may belong to another writer.
        if not mark:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the objects of incomplete uploads; if the store has no root, all objects."""
        if not self.exists():
            if STARTED in self._bucket.names():
                names = self._bucket.under()
                self._bucket.delete(names - {STARTED})
                # STARTED is deleted last: without it, after a kill, `check_place` would refuse the
                # remaining objects as a user's own.
                self._bucket.delete([STARTED])
            return
        self._bucket.delete([STARTED])
        for number in self._uploaded() - self.published():
            self._bucket.delete(self._bucket.under(f"parts/{number}"))

    def clear_part(self, number: int) -> None:
        """Do nothing: several processes cannot write a store in a bucket."""

    def create(self) -> Sink:
        self.clear()
        return ZarrSink(self._work("new"))

    def begin(self) -> None:
        # STARTED is written before all other objects: after a kill, it marks them as an incomplete
        # start.
        self._bucket.write(STARTED, self.mark.encode())
        folder = self._work("new")
        self._upload(folder)
        self._write_root((folder / ROOT).read_bytes(), None)
        self._bucket.delete([STARTED])
        files.discard(folder.parent, folder.name)

    def _upload(self, folder: Path, to: str = "") -> None:
        """Upload all files of a folder except its own zarr.json."""
        paths = (file for file in sorted(folder.rglob("*")) if file.is_file())
        named = {file.relative_to(folder).as_posix(): file for file in paths}
        named.pop(ROOT)
        self._bucket.put_files({f"{to}{name}": file for name, file in named.items()})

    def complete(
        self, attributes: dict[str, Any], arrays: Iterable[tuple[str, Array]], missing: set[str]
    ) -> None:
        work = self._work("outside")
        updated = ZarrSink(work).finish_missing(attributes, arrays, missing)
        self._upload(work)
        groups = [f"{group}/{ROOT}" for group in sorted(groups_of(updated["arrays"]) - {""})]
        for name, exists in zip(groups, self._bucket.has_all(groups), strict=True):
            if not exists:
                self._bucket.write(name, group_json({}))
        if updated != attributes:  # another release wrote other metadata
            self._replace_root(updated)
        files.discard(work.parent, work.name)

    def _replace_root(self, attributes: dict[str, Any]) -> None:
        """Replace the root, unless another process has changed it since it was read."""
        root = self._bucket.tagged(ROOT)
        if root is None:
            raise self._removed()
        self._write_root(group_json(attributes), root.tag)

    def _write_root(self, data: bytes, tag: str | None) -> None:
        try:
            if self._bucket.put_if(ROOT, data, tag) is None:
                raise UserError(
                    f"{self.path}: another process has started or sealed it in the meantime; wait"
                    " until that process ends, and run the same command again"
                )
        except NotImplementedError:  # then only the lease prevents a second writer
            self._bucket.write(ROOT, data)

    def _removed(self) -> StoreError:
        return StoreError(
            f"{self.path}: was deleted while it was being written; run the same command again"
        )

    def source(self) -> StoreSource:
        return ZarrSource(self.path)

    def part(self, number: int) -> Sink:
        return ZarrSink(self._work(f"part-{number}"))

    def publish(self, number: int) -> None:
        # Without a root the uploaded part would belong to no store.
        if not self.exists():
            raise self._removed()
        folder = self._work(f"part-{number}")
        self._upload(folder, f"parts/{number}/")
        self._bucket.write(f"parts/{number}/{ROOT}", (folder / ROOT).read_bytes())
        files.discard(folder.parent, folder.name)

    def _uploaded(self) -> set[int]:
        """Return the numbers of the parts that have objects, complete or not."""
        with suppress(FileNotFoundError):
            return part_numbers_in(self._bucket.names("parts"))
        return set()

    def published(self) -> set[int]:
        numbers = sorted(self._uploaded())
        complete = self._bucket.has_all(f"parts/{number}/{ROOT}" for number in numbers)
        return {number for number, done in zip(numbers, complete, strict=True) if done}

    def seal(self, make: SealContent) -> None:
        work = self._work("manifest")
        attributes = ZarrSink(work).finish(make)
        for name in LAST:
            self._bucket.delete(self._bucket.under(name))  # left by a kill while sealing
        self._upload(work)
        files.discard(work.parent, work.name)
        self._replace_root(attributes)
