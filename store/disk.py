"""Making files last: fsync, and one writer for each store."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from store.errors import StoreError

_held: dict[str, int] = {}


def sync(path: Path) -> None:
    """fsync a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder of a tree, many at once: a disk joins them into few writes."""
    paths = [folder, *folder.rglob("*")]
    with ThreadPoolExecutor(16) as workers:
        list(workers.map(sync, paths))


def rename(source: Path, target: Path) -> None:
    """Rename and make the new name last."""
    os.rename(source, target)
    sync(target.parent)


def lock(folder: Path) -> None:
    """Keep other processes from writing under `folder` until `unlock` or the process ends."""
    import fcntl

    key = str(folder.resolve())
    unlock(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise StoreError(f"{folder}: another process is writing this store; wait for it") from None
    except OSError:  # a file system without locks
        os.close(handle)
        return
    _held[key] = handle


def unlock(folder: Path) -> None:
    """Let others write under `folder`."""
    handle = _held.pop(str(folder.resolve()), None)
    if handle is not None:
        os.close(handle)
