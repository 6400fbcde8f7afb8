"""Checks of untrusted stores: no link leads out of the store, and no array exhausts the memory."""

from __future__ import annotations

import os
import stat

from teachonce.store.errors import StoreError

MAX_JSON = 2**25  # parsed JSON takes about 30 times as many bytes of memory
# MAX_CHUNK, MAX_RATIO and SMALL are limits of FORMAT.md, section 3.
MAX_CHUNK = 2**30
MAX_RATIO = 2**15  # the limit; Blosc packs a chunk of equal bytes into about 60 bytes
SMALL = 2**26  # decoded bytes that an array may have whatever its stored size
MAX_LISTED = 8  # damaged chunks of an array named in messages; a few bytes may declare 2^26 chunks
# Limits of the manifest: half of it is checksums, which do not compress.
JSON_RATIO, JSON_SMALL = 16, 2**20
MAX_CHECKED = 4096  # folders remembered as checked; bounds the memory


class Folder:
    """Checks that names in a folder are ordinary files inside it."""

    # A link could lead to any file of this machine, and reading a pipe would never end.

    def __init__(self, root: str) -> None:
        self.root = root
        self._inside = {""}  # folders under the root that were checked

    def check(self, name: str, limit: int | None = None) -> None:
        """Raise StoreError if `name` exists and is not an ordinary file (of at most `limit` bytes)
        inside the folder."""
        self.enter(name.rpartition("/")[0])
        path = os.path.join(self.root, name)
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                self._check_link(name)
                status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            # The read that follows reports a missing file.
            return
        except OSError as error:
            raise StoreError(f"{self.root}: {name} cannot be opened ({error})") from error
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{self.root}: {name} is not an ordinary file; the store is damaged")
        if limit is not None and status.st_size > limit:
            raise StoreError(f"{self.root}: {name} is larger than {limit:,} bytes")

    def enter(self, folder: str) -> None:
        """Raise StoreError if the path of a folder leads out of the store."""
        if folder in self._inside:
            return
        parent, _, last = folder.rpartition("/")
        self.enter(parent)
        if last == ".." or os.path.isabs(folder) or os.path.islink(os.path.join(self.root, folder)):
            self._check_link(folder)
        if len(self._inside) > MAX_CHECKED:
            self._inside = {""}
        self._inside.add(folder)

    def _check_link(self, name: str) -> None:
        real = os.path.realpath(os.path.join(self.root, name))
        # The store itself may be a link, so both paths are resolved.
        if not real.startswith(os.path.join(os.path.realpath(self.root), "")):
            raise StoreError(
                f"{self.root}: {name} is a symbolic link to a place outside the store, which is not"
                " followed; copy the store with its files (cp -rL)"
            )


def check_size(where: str, decoded: int, chunk: int, stored: int, is_json: bool) -> None:
    """Raise StoreError if an array declares more bytes than its stored bytes can decode to.

    decoded, chunk: declared bytes of the array and of one chunk. stored: bytes of its chunks.
    is_json: the array is JSON text, which has its own limit.
    """
    # Call it before allocating: a few bytes can declare a shape that no memory holds.
    limit = SMALL + MAX_RATIO * stored
    allowed = JSON_SMALL + JSON_RATIO * stored if is_json else limit
    if chunk > min(MAX_CHUNK, limit) or decoded > allowed:
        raise StoreError(
            f"{where}: declares {decoded:,} bytes (in chunks of {chunk:,}), too many for the"
            f" {stored:,} bytes that are stored; the store is damaged"
        )
