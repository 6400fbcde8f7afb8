"""List the copies of a store's text that commands of this package make, so that `feature-store
forget` removes or names them.

Each line of a list is a JSON object. For a store on a disk, the list is `.NAME.derived` next to it.
A second list is in the user's cache folder, named by the hash of the store's text. It is used if
the store was renamed or moved, or if nothing can be written next to it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from teachonce.store.format.manifest import Manifest
from teachonce.support import files
from teachonce.support.files import cache_folder
from teachonce.support.redaction import redacted

MAX_BYTES = 2**23  # of a list, which is untrusted input
_said = set[str]()  # paths of stores for which a failed write was logged


class DerivedCopy(NamedTuple):
    """Holds one line of a list.

    kind, path: what was made, and where. text: key of the text (`Manifest.text_key`).
    time: ISO 8601, UTC. checksum: for a disk cache, the checksum by which it names the store.
    """

    kind: str
    path: str
    text: str
    time: str = ""
    checksum: str = ""


def list_of(path: str | Path) -> Path:
    """Return the path of the list of copies next to a store on a disk."""
    store = Path(path).resolve()
    return store.parent / f".{store.name}.derived"


def _user_list(text: str) -> Path:
    return cache_folder() / "derived" / f"{text}.jsonl"


def record_copy(
    path: str, manifest: Manifest, kind: str, target: str | Path, checksum: str = ""
) -> None:
    """Add a copy to the list of the store at `path`, unless the list has it. Call this before
    anything is written to `target`. If the list cannot be written, no error is raised; that is
    logged once."""
    # Before the copy is written, so that `forget` names it even if its writer is killed.
    text, address = manifest.text_key, str(target)
    # A repository of the hub has a name, which is not a path on this machine.
    local = "://" not in address and kind != "hub"
    address = os.path.abspath(address) if local else redacted(address)
    entry = DerivedCopy(
        kind, address, text, datetime.now(UTC).isoformat(timespec="seconds"), checksum
    )
    if "://" in path:
        _add_to_user_list(entry, path)
        return
    try:
        _add(list_of(path), entry)
        with suppress(OSError):
            _add(_user_list(text), entry)
    except OSError as error:
        _add_to_user_list(entry, path)
        _warn_once(
            path,
            f"{path}: cannot record next to it what is made from it ({files.cause(error)}); if"
            f" another user forgets documents there, {address} is not named",
        )


def _add_to_user_list(entry: DerivedCopy, path: str) -> None:
    try:
        _add(_user_list(entry.text), entry)
    except OSError as error:
        _warn_once(
            path,
            f"{redacted(path)}: cannot record what is made from it ({files.cause(error)}):"
            " `feature-store forget` does not name it",
        )


def _warn_once(path: str, message: str) -> None:
    if path not in _said:
        _said.add(path)
        logging.getLogger(__name__).warning("%s", message)


def _add(file: Path, entry: DerivedCopy) -> None:
    """Append a line unless the list has it. Raises OSError."""
    # Otherwise the list would grow by a line with each training on the store.
    if any(old._replace(time="") == entry._replace(time="") for old in _lines(file)):
        return
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True, exist_ok=True)
    opened = files.open_ordinary(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        if os.fstat(opened).st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
        # one write for a line, so that lines of several processes do not mix
        os.write(opened, (json.dumps(entry._asdict()) + "\n").encode())
    finally:
        os.close(opened)


def _lines(file: Path) -> Iterator[DerivedCopy]:
    """Yield the lines of a list. Invalid lines are skipped, because a kill may have truncated
    one."""
    try:
        opened = files.open_ordinary(file)  # follows no link
    except OSError:
        return
    with os.fdopen(opened, "rb") as data:
        # `_add` compares the size before it appends, so the last line may end beyond MAX_BYTES.
        text = data.read(MAX_BYTES + 2**16).decode("utf-8", "replace")
    for line in text.splitlines():
        if entry := _entry(line):
            yield entry


def _entry(line: str) -> DerivedCopy | None:
    try:
        fields: Any = json.loads(line)
        entry = DerivedCopy(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    # `os.lstat` raises ValueError for a path with a null byte.
    return entry if all(isinstance(value, str) and "\0" not in value for value in entry) else None


def recorded_copies(path: str | Path, text: str) -> list[DerivedCopy]:
    """Return the entries of both lists of a local store with the text key `text`, each once."""
    copies = dict[DerivedCopy, DerivedCopy]()
    lists = [list_of(path)]
    with suppress(FileNotFoundError):  # a user without a home
        lists.append(_user_list(text))
    for file in lists:
        for entry in _lines(file):
            copies[entry._replace(time="")] = entry
    return list(copies.values())


def carry_over(path: str | Path, text: str, entries: Collection[DerivedCopy]) -> None:
    """Add entries to both lists of a store whose text key has changed to `text`, so that a later
    `forget` finds them, too. A list that cannot be written is left unchanged."""
    with suppress(OSError):
        for entry in entries:
            _add(list_of(path), entry)
    with suppress(OSError):
        for entry in entries:
            _add(_user_list(text), entry)
