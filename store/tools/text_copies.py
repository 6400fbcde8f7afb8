"""Find files that were made from a store and contain its text. `forget` removes those that can be
made again, and names the others."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from teachonce.store.containers.disk_cache import DiskCache
from teachonce.store.containers.zarr.tree import shard_path
from teachonce.store.read.derived_copies import DerivedCopy, carry_over, list_of, recorded_copies
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.show import printable
from teachonce.support.console import counted
from teachonce.support.errors import UserError

# Names that this package gives to its caches: `remove_caches` removes no other file.
ARROW = re.compile(r"[0-9a-f]{32}\.arrow")
TOKENS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
SHOWN = 20  # copies that are named in lines
AGAIN = "remove it, and make it again"
REMEDIES = {
    "datasets": "remove it: `to_datasets` makes it again",
    "mapped": "made by `datasets` from rows of this store, or of another: remove it",
    "tokens": "remove it: a training makes it again",
    "disk cache": "remove its folder: it is filled again",
    "page": f"a page, which quotes texts: {AGAIN}",
    "table": f"an export: {AGAIN}",
    "store": "a copy of the store: forget there as well",
    "address": "a copy at an address: copy this store to another name, then remove the old copy",
    "hub": "a repository: remove the store there with its history, and push this one",
    "student": "a student, trained on the texts: remove it, and train it again",
}


def remove_caches(store: FeatureStore) -> list[str]:
    """Remove the caches that contain the text of a store: Arrow files of `to_datasets`, tokens, and
    entries of disk caches. Return their paths.

    The list of copies is untrusted input. So a removed file belongs to this user, is in a folder
    for its kind, and has a name or content which shows that it was made from this store.
    """
    removed, text = list[str](), store.manifest.text_key
    for entry in recorded_copies(store.path, text):
        path = Path(entry.path)
        # A cache that cannot be removed is listed later, by `remaining_copies`.
        with contextlib.suppress(OSError, UserError):
            if entry.kind == "datasets" and _is_ours(path, stat.S_ISREG) and _is_rows(path, store):
                path.unlink()
            elif entry.kind == "tokens" and _is_ours(path, stat.S_ISDIR) and _is_tokens(path, text):
                shutil.rmtree(path)
            # Every disk cache has a file `lock`; another folder is left alone.
            elif entry.kind == "disk cache" and _is_ours(path / "lock", stat.S_ISREG):
                DiskCache(path, 0).forget(entry.checksum, *_stored_names(store))
            else:
                continue
            removed.append(entry.path)
    return removed


def _is_ours(path: Path, is_kind: Callable[[int], bool]) -> bool:
    # lstat: a link in an untrusted list must not lead the removal to another file.
    status = os.lstat(path)
    return status.st_uid == os.geteuid() and is_kind(status.st_mode)


def _is_tokens(path: Path, text: str) -> bool:
    named = TOKENS.fullmatch(path.name) and path.name.startswith(f"{text}-")
    return bool(named) and path.parent.name == "tokens"


def _is_rows(path: Path, store: FeatureStore) -> bool:
    """Return whether a file is an Arrow file that `to_datasets` wrote of this store, by its name
    and its schema."""
    if not ARROW.fullmatch(path.name):
        return False
    import pyarrow as pa

    from teachonce.store.read.table_files import rows_name

    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as rows:
            schema = rows.schema
    except pa.ArrowInvalid:
        return False
    return path.stem == rows_name(store.manifest.content(), schema)


def _stored_names(store: FeatureStore) -> Iterator[str]:
    """Yield the names of the files that the arrays of `store` have in a Zarr store."""
    parts = (
        (f"parts/{part.number}/{name}", entry)
        for part in store.manifest.parts
        for name, entry in part.arrays.items()
    )
    for name, entry in chain(store.manifest.arrays.items(), parts):
        yield from (f"{name}/zarr.json", shard_path(name, entry.shape))


@dataclass(frozen=True)
class RemainingCopies:
    """Lists files that may contain texts that were removed from a store.

    there: copies that exist, or are at a URL or on the hub. lost: copies whose path was not found.
    names: path of the list of copies next to the store. listed: whether this list existed.
    """

    there: tuple[DerivedCopy, ...]
    lost: tuple[DerivedCopy, ...]
    names: str
    listed: bool = True

    def lines(self) -> Iterator[str]:
        """Yield a line for each copy, with what to do about it."""
        for entry in self.there[:SHOWN]:
            remedy = REMEDIES.get(entry.kind, AGAIN)
            yield f"may hold the texts: {printable(entry.path)} ({entry.time[:10]}): {remedy}"
        if len(self.there) > SHOWN:
            yield f"and {len(self.there) - SHOWN:,} more; --json lists all"
        if self.lost:
            places = counted(len(self.lost), "place")
            yield f"not found at {places}, removed or on another machine: see {self.names}"
        if not self.listed:
            yield (
                f"{printable(self.names)}: not found; if the store was renamed or moved, copies"
                " that other users, or other machines, made of it before are not known"
            )


def remaining_copies(path: str | Path, text: str, removed: Collection[str] = ()) -> RemainingCopies:
    """Find the remaining copies of a store's text after documents were forgotten.

    text: the text key of the store before. removed: the caches that `remove_caches` removed.
    """
    with contextlib.closing(open_store(path)) as store:
        text_key = store.manifest.text_key
    present, lost = list[DerivedCopy](), list[DerivedCopy]()
    entries, listed = recorded_copies(path, text), os.path.lexists(list_of(path))
    carry_over(path, text_key, entries)
    for entry in entries:
        # Copies of the present text have none of the forgotten documents. A store that is itself a
        # copy has an entry in its lists; that entry is left out.
        if entry.text == text_key or entry.path in (*removed, os.path.abspath(path)):
            continue
        far = "://" in entry.path or entry.kind == "hub"
        (present if far or os.path.lexists(entry.path) else lost).append(entry)
    present += _made_by_datasets(entries)
    return RemainingCopies(tuple(present), tuple(lost), str(list_of(path)), listed)


def _made_by_datasets(entries: list[DerivedCopy]) -> Iterator[DerivedCopy]:
    """Yield the files in which `datasets` caches results of `map` and `filter`, next to the rows of
    a store."""
    folders = {os.path.dirname(entry.path): entry for entry in entries if entry.kind == "datasets"}
    for folder, entry in folders.items():
        with contextlib.suppress(OSError):
            for file in sorted(os.scandir(folder), key=lambda file: file.name):
                # `datasets` names them by a fingerprint that does not show the store, so they are
                # listed and not removed.
                if file.name.startswith("cache-") and file.name.endswith(".arrow"):
                    yield entry._replace(path=file.path, kind="mapped")
