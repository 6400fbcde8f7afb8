"""Quarantine the damaged parts and arrays of a store.

The command that made the store, typed again, then makes exactly these parts and arrays again.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from teachonce.store.containers.hdf5.file import Hdf5Sink
from teachonce.store.containers.hdf5.staging import OUTSIDE, Hdf5Staging, write_unfinished
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.interface import groups_of
from teachonce.store.containers.paths import LocalStaging, local_staging_of
from teachonce.store.containers.zarr.shards import group_json
from teachonce.store.errors import StoreError, missing, without_remedy
from teachonce.store.format.identity import making_command
from teachonce.store.format.layout import VERSIONS, part_arrays, part_number
from teachonce.store.format.manifest import Entry, Part, check_root
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.damaged import DamagedStore, Report, open_damaged
from teachonce.store.tools.verify import Progress, verify_opened
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import sealed_root
from teachonce.store.write.writer import StoreWriter
from teachonce.support import files
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease

NEW = ".tmp-repair-"  # the next writer removes names that begin with .tmp- (FORMAT.md, section 9)


def repair(path: str | Path, progress: Progress = lambda items, unit: items) -> tuple[int, Report]:
    """Verify a store, and move damaged parts and arrays into a quarantine folder next to it.

    Returns the number of sound parts and the report, which names the quarantine folder and the next
    step. If no problem was found, the store is unchanged. If everything lost can be derived from
    the rest of the store (manifest, root, groups, bytes in gaps), it is derived, and the store is
    sealed on return. Otherwise the store becomes an unfinished store without the damaged parts and
    arrays. The command that made the store makes these again, with the same bytes as before.
    Unknown files are left unchanged. After a kill, call it again. Raises UserError if the store
    cannot be repaired.
    """
    if "://" in str(path):
        raise UserError(
            f"{path}: only a store at a local path can be repaired; repair the local store that it"
            " was copied from, delete this copy, and copy the store again with `feature-store"
            " convert`"
        )
    staging = local_staging_of(path)
    if not staging.path.exists():
        raise UserError(missing(path))
    lease = staging.lease()
    try:
        # A process that shares a dump holds the lease of its part, not of the store.
        PartQueue(staging.path).check_idle()
        staging.clear()  # temporary files of a killed repair or writer
        if isinstance(staging, Hdf5Staging) and StoreWriter.peek(path, "sealed"):
            # Only next to a readable file: otherwise these parts may be all that is left.
            staging.clean()
        opened = _opened(staging)
        report = verify_opened(opened, progress)
        for problem in report.damage:
            # The checksum of a wrong value is right: making the part again gives the same bytes.
            if (problem.part, problem.array, problem.group) == (None, None, None):
                raise _hopeless(staging, problem.line, opened.store.identity)
        numbers = set(opened.store.manifest.numbers.tolist())
        sound = len(numbers - report.damaged_parts())
        # Another process may have taken the lease over during the verification.
        lease.check()
        sealed = opened.sealed
        if report.damage:
            sealed = _remove_damaged(staging, opened, report, lease)
        report.advice = _advice(opened, report, sound, sealed)
        return sound, report
    except OSError as error:
        raise StoreError(f"{path}: cannot be repaired: {files.reason(error)}") from error
    finally:
        lease.close()


def _opened(staging: LocalStaging) -> DamagedStore:
    try:
        return open_damaged(staging.path)
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        raise _hopeless(staging, without_remedy(error), {}) from error


def _hopeless(staging: LocalStaging, reason: str, identity: Mapping[str, Any]) -> UserError:
    both = ""
    if isinstance(staging, Hdf5Staging) and staging.parts.exists():
        both = f" and {staging.parts}"
    return UserError(
        f"{staging.path}: {reason.removeprefix(f'{staging.path}: ')}; the rest of the store cannot"
        f" repair this: restore it from a copy, or remove it{both} and repeat the command that made"
        f" it ({making_command(identity)})"
    )


def _remove_damaged(
    staging: LocalStaging, opened: DamagedStore, report: Report, lease: Lease
) -> bool:
    """Remove what is damaged from the store, and seal it if nothing is missing then.

    Returns whether it is sealed.
    """
    attributes = unsealed(opened.attributes, opened.store.manifest.arrays)
    unsealing = Unsealing(opened.store, attributes, report, lease, Quarantine(staging.path))
    unsealing.run(staging, opened.sealed)
    opened.store.close()
    if unsealing.quarantine.used:
        report.quarantine, report.undo = unsealing.quarantine.path, unsealing.quarantine.undo()
    lacking = report.lost_outside() or any(p.part is not None for p in report.damage if not p.group)
    if lacking or not opened.sealed:
        return False
    # Seal it only if that gives the old manifest or its old checksum, which proves that nothing is
    # missing.
    with closing(staging.source()) as source:
        features = check_root(attributes, str(staging.path))
        root, data = sealed_root(source, attributes, features, lambda name, values: None)
    if data != opened.manifest and root["checksum"] != opened.checksum:
        return False
    StoreWriter(staging, attributes, lease).seal()
    return True


def unsealed(attributes: Mapping[str, Any], arrays: Mapping[str, Entry]) -> dict[str, Any]:
    """Return the root attributes with which a sealed store becomes an unfinished one that lists
    these arrays outside its parts."""
    root = {key: value for key, value in attributes.items() if key != "checksum"}
    entries = {name: entry.to_json() for name, entry in arrays.items()}
    # Version 1: sealing chooses the final one by the number of parts.
    return root | {"state": "writing", "version": VERSIONS[0], "arrays": entries}


def _advice(opened: DamagedStore, report: Report, sound: int, sealed: bool) -> str:
    """Describe in one line what was done and what to do next; "" if the store was sound."""
    lines, command = [], making_command(opened.store.identity)
    if sealed and report.damage:
        lines.append("repaired: everything damaged could be derived from the rest of the store")
    elif not sealed and report.damage:
        lines.append(
            f"{counted(sound, 'sound part')} left; repeat the command that made the store"
            f" ({command}): it writes only what is missing"
        )
    elif not sealed:
        lines.append(f"is not finished; repeat the command that makes it ({command})")
    if report.quarantine:
        lines.append(
            f"what was damaged is now in {report.quarantine}: delete it when the store is sound, or"
            f" undo the repair with: {report.undo}"
        )
    return "; ".join(lines)


class Unsealing:
    """Turns a store into an unfinished store of its sound parts and arrays.

    attributes: root attributes of that unfinished store.
    """

    def __init__(
        self,
        store: FeatureStore,
        attributes: dict[str, Any],
        report: Report,
        lease: Lease,
        quarantine: Quarantine,
    ) -> None:
        self.store, self.attributes, self.report, self._lease = store, attributes, report, lease
        self.quarantine, lost = quarantine, report.damaged_parts()
        self.parts = [part for part in store.manifest.parts if part.number not in lost]
        self.outside = [n for n in store.manifest.arrays if n not in report.lost_outside()]

    def run(self, staging: LocalStaging, sealed: bool) -> None:
        """Quarantine what is damaged, then write root and groups again.

        After a kill in between, no store is sealed with damage, and another repair continues.
        """
        if not isinstance(staging, Hdf5Staging):
            self._zarr(staging.path)
            return
        staging.parts.mkdir(exist_ok=True)
        for number in sorted(staging.published() - {part.number for part in self.parts}):
            self.quarantine.move(staging.parts / f"{number}.h5")
        altered = {problem.part for problem in self.report.damage}
        # Parts are written first: until then, only the sealed file has them.
        for part in self.parts:
            if sealed or part.number in altered:
                self.quarantine.copy(staging.parts / f"{part.number}.h5")
                self._write_part(staging, part)
        # A file under its final name is never modified, only replaced (FORMAT.md, section 9).
        if sealed or None in altered:
            self._replace(staging)

    def _zarr(self, path: Path) -> None:
        quarantine, sound = self.quarantine, {part.number for part in self.parts}
        quarantine.move_link_out(path / "parts")
        (path / "parts").mkdir(exist_ok=True)
        for entry in sorted((path / "parts").iterdir()):
            if (number := part_number(entry.name)) is not None and number not in sound:
                quarantine.move(entry)
        for name in sorted(self.report.lost_outside()):
            quarantine.move(path / name)
        # A process that has taken the lease over may be writing these very files.
        self._lease.check()
        for group, attributes in sorted(self._groups().items()):
            self._write_group(path / group / "zarr.json", attributes)
        self._write_group(path / "zarr.json", self.attributes)
        # The manifest is moved after the root is written (FORMAT.md, section 9): a sealed root
        # needs its manifest.
        quarantine.move(path / "manifest")

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of the groups to write again: all outside the parts, and in sound
        parts the groups that have a problem."""
        groups: dict[str, dict[str, Any]] = {g: {} for g in groups_of(self.outside) - {""}}
        reported = {problem.group for problem in self.report.damage}
        for part in self.parts:
            prefix = f"parts/{part.number}"
            inner = groups_of((f"{prefix}/{name}" for name in part.arrays), prefix) - {prefix}
            groups |= {group: {} for group in inner & reported}
            if prefix in reported:
                groups[prefix] = {"part": part.to_json()}
        return groups

    def _write_group(self, target: Path, attributes: dict[str, Any]) -> None:
        """Write the metadata of a group, unless the file has them already."""
        data = group_json(attributes)
        # Equal metadata stay, so that the quarantine folder holds only what was damaged.
        if target.is_file() and not target.is_symlink() and target.read_bytes() == data:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            self.quarantine.move(target)
        else:
            self.quarantine.copy(target)
        files.write(target, data)

    def _replace(self, staging: Hdf5Staging) -> None:
        """Write the file of an unfinished store, then rename it over the old one."""
        new = staging.path.with_name(f".{staging.path.name}.new-repair-{_random()}")
        arrays = ((name, self.store.outside(name)) for name in self._in_order(staging))
        write_unfinished(new, self.attributes, arrays)
        self._lease.check()
        self.quarantine.copy(staging.path)
        files.rename(new, staging.path)

    def _in_order(self, staging: Hdf5Staging) -> list[str]:
        """Return the arrays outside the parts, in the order of the file."""
        # HDF5 lays arrays out as they are written: only in this order does the store, once it is
        # sealed again, have its old bytes.
        names: list[str] = []
        for group in sorted(OUTSIDE):
            with suppress(StoreError):  # unreadable: then any order will do
                names += Hdf5Source(str(staging.path)).arrays(group)
        order = {name: index for index, name in enumerate(names)}
        return sorted(self.outside, key=lambda name: order.get(name, len(order)))

    def _write_part(self, staging: Hdf5Staging, part: Part) -> None:
        """Publish a part again, array by array."""
        # Not by HDF5's copy: it would take unknown objects along, and a crafted file crashes it.
        prefix = f"parts/{part.number}"
        new = staging.parts / f"{NEW}{_random()}-{part.number}.h5"
        with Hdf5Sink(new, prefix=prefix) as sink:
            for name, spec in part_arrays(self.store.features, part.counts).items():
                array = self.store.source.array(f"{prefix}/{name}")
                sink.array(name, array.read(0, spec.shape[0]), spec)
            sink.attributes("", {"part": part.to_json()})
        files.rename(new, staging.parts / f"{part.number}.h5")


def _random() -> str:
    """Return the random part of a temporary name."""
    # In an untrusted folder a link placed under a predictable name would redirect the write.
    return secrets.token_hex(8)


def quarantines_of(store: Path) -> list[Path]:
    """Return the quarantine folders next to a store."""
    real = store.resolve()
    names = re.compile(rf"{re.escape(real.name)}\.aside-\d+")
    return sorted(path for path in real.parent.iterdir() if names.fullmatch(path.name))


class Quarantine:
    """Moves files to the folder `<name>.aside-<n>` next to a store, created at the first move.

    Moved files have the same relative paths as in the store: copying them back into the store's
    folder undoes a repair.
    """

    def __init__(self, store: Path) -> None:
        self._store, self._real = store, store.resolve()  # next to the data, not to a link
        names = (f"{self._real.name}.aside-{number}" for number in itertools.count(1))
        paths = (self._real.with_name(name) for name in names)
        self.path = next(path for path in paths if not os.path.lexists(path))

    @property
    def used(self) -> bool:
        return self.path.is_dir()

    def move(self, path: Path) -> None:
        """Move a file or folder of the store into quarantine, if it exists. If a folder above it is
        a link out of the store, move the link instead."""
        # The outermost folder is tested first, because a link above a path decides where the path
        # lies.
        for above in (*reversed(path.parents), path):
            if above.is_relative_to(self._store) and self._leads_out(above):
                path = above
                break
        if os.path.lexists(path):
            files.rename(path, self._target(path))

    def move_link_out(self, path: Path) -> None:
        """Quarantine a path if it is a link out of the store; its target is not read."""
        if self._leads_out(path):
            self.move(path)

    def _leads_out(self, path: Path) -> bool:
        """Return whether a path is a link out of the store, or a broken link."""
        if path == self._store or not path.is_symlink():
            return False
        real = Path(os.path.realpath(path))  # pathlib's resolve raises RuntimeError for a circle
        return not path.exists() or not real.is_relative_to(self._real)

    def copy(self, path: Path) -> None:
        """Hard-link a file into quarantine before it is replaced; copy it if links fail."""
        if os.path.lexists(path):
            target = self._target(path)
            try:
                # The old file is linked, not moved: it retains its name until the new file replaces
                # it.
                os.link(path, target)
            except OSError:
                shutil.copy2(path, target)
                files.sync(target)
            files.sync(target.parent)

    def _target(self, path: Path) -> Path:
        if path.is_relative_to(self._store):
            target = self.path / self._real.name / path.relative_to(self._store)
        else:
            target = self.path / path.relative_to(self._store.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def undo(self) -> str:
        """Return the shell command that undoes the repair."""
        return shlex.join(["cp", "-a", f"{self.path}/.", f"{self._real.parent}/"])
