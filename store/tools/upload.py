"""Put a store on an object store, where it looks sealed only once it is whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec

from store.containers.zarr.tree import ZarrSource
from store.errors import StoreError
from store.read.store import open_store
from support.errors import ANOTHER, UserError, first_line

ROOT = "zarr.json"


def upload(
    source: str | Path,
    target: str,
    storage_options: dict[str, Any] | None = None,
    *,
    progress: Callable[[list[Any]], Any] = lambda items: items,
) -> None:
    """Copy a sealed Zarr folder to an fsspec URL, `zarr.json` of the root, which alone says that it
    is sealed, last: killed before, it is refused by every reader, and another call copies it anew.

    Each file's size is asked for afterwards. Raises UserError for a source that is no such folder
    and a target that exists, StoreError where the target cannot be written.
    """
    with closing(open_store(source)) as store:  # a sound and sealed one
        if not isinstance(store.source, ZarrSource) or "://" in str(source):
            raise UserError(
                f"{source}: only a Zarr folder can be copied to {target}; convert it to .zarr first"
            )
    folder, target = Path(source), target.rstrip("/")
    try:
        remote, root = fsspec.core.url_to_fs(target, **(storage_options or {}))
        if remote.exists(f"{root}/{ROOT}"):
            raise UserError(f"{target} exists already; {ANOTHER}")
        inner = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        inner.remove(folder / ROOT)
        for path in progress([*inner, folder / ROOT]):
            there = f"{root}/{path.relative_to(folder).as_posix()}"
            remote.pipe_file(there, path.read_bytes())
            if remote.size(there) != path.stat().st_size:
                raise StoreError(f"{target}: {there} has not arrived whole; type the command again")
    except UserError:
        raise
    except Exception as error:  # every client raises its own
        raise StoreError(
            f"{target}: cannot be written: {first_line(error)}; check the address, the network and"
            " the credentials, and type the same command again"
        ) from error
