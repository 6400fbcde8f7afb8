"""Inspect what exists at the path of a store before it is written: nothing, an unfinished or a
finished store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.interface import Staging
from teachonce.store.containers.paths import staging_of
from teachonce.store.containers.zarr.staging import ZarrStaging
from teachonce.store.errors import StoreError, Unreachable, command, without_remedy
from teachonce.store.format.features import Calibration, Features
from teachonce.store.format.identity import object_in
from teachonce.store.format.layout import FORMAT, VERSIONS
from teachonce.store.format.manifest import check_root, read_entries
from teachonce.store.read.manifests import (
    calibration_paths,
    missing_outside,
    published_parts,
    read_outside,
)
from teachonce.store.write.part_queue import PartQueue
from teachonce.support import files
from teachonce.support.differences import check_same, describe_changes, differences
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.lease import Lease, lease_path
from teachonce.support.redaction import without_paths


def _json(value: Mapping[str, Any], subject: str) -> dict[str, Any]:
    try:
        # The result is compared with stored attributes, in which tuples are lists and keys are
        # text.
        decoded: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{subject} cannot be written as JSON ({error})") from error
    return decoded


@contextmanager
def disk_errors(path: Path | str, subject: str = "") -> Iterator[None]:
    """Raise errors of the disk inside the `with` block as StoreError, with cause and remedy.

    path: the store that is written, for the message.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py raises RuntimeError for a full disk
        new = isinstance(path, Path) and not path.exists()
        safe = "" if new else " (published parts are not lost)"
        raise StoreError(
            f"cannot write {subject}{path}: {files.reason(error)} and run the same"
            f" command again{safe}"
        ) from error


def unfinished(staging: Staging) -> dict[str, Any]:
    """Return the root attributes of the unfinished store at the path of `staging`. Raises UserError
    if there is no store, or a finished one."""
    attributes = root_of(staging)
    if attributes is None or attributes["state"] != "writing":
        raise UserError(f"{staging.path}: is not an unfinished store")
    return attributes


def check_joinable(
    path: str | Path,
    identity: Mapping[str, Any],
    features: Features,
    software: Mapping[str, Any],
    shared: bool = True,
) -> None:
    """Raise UserError if a store at `path`, finished or not, was started with other arguments, or,
    if it is `shared`, with other software."""
    attributes = new_attributes(identity, features, software)
    check_continued(staging_of(path), attributes, shared)


def new_attributes(
    identity: Mapping[str, Any], features: Features, software: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the root attributes of a store that is started now."""
    return {
        "format": FORMAT,
        "version": VERSIONS[0],  # sealing chooses the final one by the number of parts
        "state": "writing",
        "identity": _json(identity, "identity"),
        "features": features.to_json(),
        "software": _json(software or {}, "software"),
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def check_continued(staging: Staging, attributes: dict[str, Any], shared: bool = False) -> bool:
    """Return whether there is a store to continue. Raises UserError if it has other arguments, and,
    if `shared`, also if it was started with other software."""
    stored = root_of(staging)
    if stored is None:
        return False
    changes = changed_arguments(stored, attributes["identity"], attributes["features"])
    versions = describe_changes(stored["software"], attributes["software"])
    check_same(staging.path, changes, versions if attributes["software"] else "")
    if shared and versions:
        raise UserError(
            f"{staging.path}: was started with other versions ({versions}), and processes that"
            " write one store together need the same versions; install those that it was started"
            " with, continue without --shard in one process, or give another name"
        )
    return True


def changed_arguments(
    stored: Mapping[str, Any], identity: Mapping[str, Any], features: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """List how the identity and features (as JSON) of a dump differ from the root attributes of a
    store; see `differences`."""
    before = Features.from_json(stored["features"])
    # Encodings are derived again: releases word their descriptions differently.
    expected = {**stored["features"], "encodings": before.level.encodings(before.kinds)}
    if before.task and before.task.problem_type is None and (task := features.get("task")):
        # Older stores lack the problem type; the teacher's config, also compared, includes it.
        features = {**features, "task": {k: v for k, v in task.items() if k != "problem_type"}}
    then = {**stored, "identity": _without_folder(stored["identity"]), "features": expected}
    now = {"identity": _without_folder(_json(identity, "identity")), "features": features}
    return list(chain.from_iterable(differences(then[key], now[key], key) for key in now))


def _without_folder(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the teacher's path in an identity by its last name."""
    # Older stores hold the whole path. The path need not match, because the hashes of the weights
    # are compared.
    teacher = object_in(identity, "teacher")
    if not isinstance(teacher.get("id"), str):
        return identity
    return {**identity, "teacher": {**teacher, "id": without_paths(teacher["id"])}}


def finished_root(path: str | Path) -> dict[str, Any] | None:
    """Return the root attributes of the finished store at `path`; None if there is no store, or an
    unfinished one.

    Files that a killed writer left next to the store are removed. Raises UserError if the path is
    not a store, or if another process is working on it.
    """
    staging = staging_of(path)
    stored = root_of(staging)
    if stored is None or stored["state"] != "sealed":
        return None
    _clean_up(staging)
    return stored


def check_writable(path: str | Path, shared: bool = False) -> None:
    """Raise UserError unless a store can be started or continued at `path`. If `shared`, other
    processes may be writing it."""
    if finished_root(path) is not None:
        raise UserError(
            f"{path}: exists already and is finished; {ANOTHER}; or, if it is damaged, run"
            f" {command('repair', path)} and run the command again"
        )
    staging = staging_of(path)
    if isinstance(staging, Hdf5Staging) and not staging.exists() and staging.published():
        raise UserError(
            f"{staging.parts}: holds parts of an unfinished store whose file {path} is missing:"
            f" restore that file and run the command again; or remove {staging.parts} to start from"
            " scratch"
        )
    staging.check_place()
    if not shared:
        with disk_errors(staging.path):
            staging.check_free()
            if isinstance(staging.path, Path):
                PartQueue(staging.path).check_idle()


def _clean_up(staging: Staging) -> None:
    """Remove the files of a writer that was killed between sealing and cleaning up.

    Raises UserError if a writer or a repair is running: the parts may be in use.
    """
    if not isinstance(staging.path, Path):
        return  # in a bucket only the lease is left, which the next writer replaces
    queue = PartQueue(staging.path)
    paths = [lease_path(staging.path), queue.folder]
    paths += [staging.parts] if isinstance(staging, Hdf5Staging) else []
    if not any(path.exists() for path in paths):
        return
    # A finished store in a read-only folder must not be refused.
    with suppress(OSError), closing(Lease(staging.path)):
        stored = root_of(staging)
        if stored and stored["state"] == "sealed":  # a repair may have unsealed it meanwhile
            if isinstance(staging, Hdf5Staging):
                staging.clean()
            queue.remove()


def root_of(staging: Staging) -> dict[str, Any] | None:
    """Return the root attributes of the store at the path of `staging`; None if nothing exists
    there. Raises UserError if it is not a store."""
    path = staging.path
    if not staging.exists():
        return None
    try:
        if isinstance(path, Path) and path.is_dir() != isinstance(staging, ZarrStaging):
            raise StoreError(f"{path}: a name in .zarr is for a folder, a name in .h5 for a file")
        with closing(staging.source()) as source:
            attributes = source.attributes()
        check_root(attributes, str(path))
    except StoreError as error:
        raise UserError(
            f"{path}: exists and is not a feature store that can be continued"
            f" ({without_remedy(error)}); nothing was changed: if it was one, run"
            f" {command('repair', path)}; else {ANOTHER}"
        ) from error
    return attributes


def check_part_entries(staging: Staging) -> None:
    """Raise StoreError if a published part of an unfinished store has no readable entry."""
    # Checked before the work: otherwise sealing would fail, hours later.
    with closing(staging.source()) as source:
        attributes = source.attributes()
        for _ in published_parts(source, check_root(attributes, str(staging.path))):
            pass


def peek(path: str | Path, state: str | None = "writing") -> dict[str, Any] | None:
    """Return the root attributes of a store; None if it cannot be read, or if its state is not
    `state` (unless `state` is None). Raises Unreachable."""
    try:
        attributes = root_of(staging_of(path))
    except Unreachable:  # a network error does not mean that there is no store
        raise
    except UserError:
        return None
    return attributes if attributes and state in (None, attributes["state"]) else None


def published_counts(path: str | Path) -> tuple[int, int]:
    """Count the published parts and tokens of an unfinished store."""
    with closing(staging_of(path).source()) as source:
        features = check_root(source.attributes(), str(path))
        tokens = [part.counts.tokens for part in published_parts(source, features)]
    return len(tokens), sum(tokens)


def stored_calibration(path: str | Path) -> Calibration | None:
    """Return (mean, deviation) float32 [D] of every hidden state of an unfinished store; None if
    one is missing.

    Raises StoreError if a checksum differs, because all parts are encoded relative to these values.
    """
    with closing(staging_of(path).source()) as source:
        attributes = source.attributes()
        entries = read_entries(attributes.get("arrays"), source.path)
        if any(name.startswith("calibration/hidden/") for name in missing_outside(source, entries)):
            return None
        read = partial(read_outside, source, entries)
        names = check_root(attributes, source.path).hidden
        paths = {name: calibration_paths(name) for name in names}
        return {name: (read(mean), read(deviation)) for name, (mean, deviation) in paths.items()}
