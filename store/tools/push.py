"""Push a store to a repository of datasets on the hub."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import StoreError
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.read.part import DAMAGED
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.copy import stored_files
from teachonce.store.tools.store_card import store_card
from teachonce.store.tools.verify import verify_store
from teachonce.support.errors import UserError
from teachonce.support.hub import (
    CARD,
    Repository,
    check_card_metadata,
    open_repository,
    with_metadata,
)

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

ROOT = "zarr.json"
MANY = 100_000  # files; the hub advises against more in a repository


def push(
    path: str | Path,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    license: str | None = None,
    language: Sequence[str] = (),
    say: Any = lambda line: None,
) -> str:
    """Copy a sealed store, .zarr or .h5, into a dataset repository of the hub, with a card. Return
    the URL of the commit that completed it.

    A folder's `zarr.json`, which marks the store as sealed, and the card are sent last: readers
    refuse a copy that was stopped, and another call sends what is missing. Licence and languages
    are entries of the card. An existing card is not replaced. The store is verified first; unknown
    files in it are not copied. `say` receives lines for the user. Raises UserError if the
    repository has another store with this name, and as `open_repository` does; StoreError if the
    source is damaged.
    """
    if "://" in str(path):
        raise UserError(f"{path}: only a store on this machine can be pushed; copy it here first")
    check_card_metadata(license, language)
    name = Path(path).absolute().name  # the folder's own name if the path is `.`
    with closing(open_store(path)) as store:
        target = open_repository(repository, "dataset", private, revision)
        say(f"verifying {path}")
        if problems := verify_store(store).problems:
            raise StoreError(f"{path}: {problems[0]}; {DAMAGED}")
        message = message or f"{name}: a store of teachonce"
        is_folder = isinstance(store.source, ZarrSource)
        root, last = (f"{name}/{ROOT}", Path(path) / ROOT) if is_folder else (name, Path(path))
        remote = target.files()
        # The root has the checksum of the manifest, so this one file identifies a whole folder.
        if root in remote and not _is_same(remote[root], last):
            raise UserError(
                f"{target.id}: already has a different store {name}; rename {path}, remove {name}"
                " from the repository, or give another repository"
            )
        record_copy(
            store.source.address, store.manifest, "hub", f"{target.id} (a repository of datasets)"
        )
        if is_folder:
            _send_folder(store, target, name, message, say)
        sent: dict[str, Path | bytes] = {root: last}  # the root completes the copy
        if CARD in remote:
            say(f"{CARD} of {target.id} is not changed")
        else:
            card = store_card(store, target.id, name)
            sent[CARD] = with_metadata(card, license, language).encode()
        # A store that was rewritten while its files were sent must not get its root.
        store.watch.check()
        return target.commit(sent, message)


def _is_same(file: RepoFile, path: Path) -> bool:
    """Return whether a file of a repository has the same bytes as the file at `path`."""
    if file.lfs:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.lfs.sha256
    data = path.read_bytes()  # not in LFS, so it is small
    # The hub reports git's hash of a small file: SHA-1 of this header and the bytes.
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == file.blob_id


def _send_folder(
    store: FeatureStore, target: Repository, name: str, message: str, say: Any
) -> None:
    """Send all files of a store but its root, and check that they have arrived."""
    folder = Path(store.path)
    names = {file for files in stored_files(store) for file in files}
    if len(names) > MANY:
        say(
            f"{len(names):,} files: the hub advises at most {MANY:,} in a repository;"
            " `feature-store convert` to .h5 makes one file of a store"
        )
    unknown = {file.relative_to(folder).as_posix() for file in folder.rglob("*")} - names
    # The client reads these names as patterns, and a name may hold a star or a bracket.
    ignored = [glob.escape(file) for file in sorted({ROOT, *unknown})]
    say(f"sending   {len(names):,} files to {target.id}")
    target.call(
        "upload_folder",
        folder_path=folder,
        path_in_repo=name,
        ignore_patterns=ignored,
        commit_message=message,
    )
    sizes = {file: info.size for file, info in target.files().items()}
    for file in sorted(names - {ROOT}):
        if sizes.get(f"{name}/{file}") != (folder / file).stat().st_size:
            raise UserError(f"{target.id}: {name}/{file} arrived incomplete; run the command again")
