"""Move what is damaged of a store aside; the command that made the store makes just this again."""

from __future__ import annotations

import itertools
import json
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
from teachonce.store.containers.hdf5.staging import OUTSIDE, Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.paths import LocalStaging, local_staging_of
from teachonce.store.containers.zarr.tree import GROUP
from teachonce.store.errors import MISSING, StoreError, without_remedy
from teachonce.store.format.identity import making_command
from teachonce.store.format.layout import (
    VERSIONS,
    groups_above,
    part_arrays,
    part_number,
    teacher_array,
)
from teachonce.store.format.manifest import Part, check_root
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.damaged import Opened, Report, open_damaged
from teachonce.store.tools.verify import Progress, verify_opened
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import sealed_root
from teachonce.store.write.writer import StoreWriter
from teachonce.support import files
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease

NEW = ".tmp-repair-"  # FORMAT.md, section 9: such names are a killed writer's, and removed


def repair(path: str | Path, progress: Progress = lambda items, unit: items) -> tuple[int, Report]:
    """Verify a store; if anything is damaged, move that aside, and keep all else.

    Returns how many parts are left, and what was found (no problem: the store is unchanged), with
    the folder beside the store that holds what was damaged, and what to do next. Where nothing is
    lost that the rest of the store does not tell (a damaged manifest, root or group, bytes in
    between), the store is finished when this returns. Otherwise it is an unfinished one without
    what was lost, and the command that made it makes that again; then it has its old bytes. Files
    that the format does not know stay. After a kill another call repairs the store. Raises
    UserError if nothing can mend the store.
    """
    if "://" in str(path):
        raise UserError(
            f"{path}: only a store at a local path can be repaired; repair the one that was copied"
            " there, remove this copy, and copy it again with `feature-store convert`"
        )
    staging = local_staging_of(path)
    if not staging.path.exists():
        raise UserError(f"{path}: {MISSING}")
    lease = Lease(staging.path)
    try:
        PartQueue(staging.path).check_idle()
        staging.clear()  # what a killed repair, or a killed writer, left
        if isinstance(staging, Hdf5Staging) and StoreWriter.peek(path, "sealed"):
            staging.clean()  # beside one that cannot be read they may be all that there is
        opened = _opened(staging)
        report = verify_opened(opened, progress)
        _check_hope(staging, opened, report)
        left = len(opened.store.manifest.parts) - len(_lost(opened, report))
        lease.check()
        whole = opened.sealed
        if report.found:
            whole = _mend(staging, opened, report, lease)
        report.advice = _advice(opened, report, left, whole)
        return left, report
    except OSError as error:
        raise StoreError(f"{path}: cannot be repaired: {files.reason(error)}") from error
    finally:
        lease.close()


def _opened(staging: LocalStaging) -> Opened:
    try:
        return open_damaged(staging.path)
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError):
            raise
        raise _hopeless(staging, without_remedy(error), {}) from error


def _lost(opened: Opened, report: Report) -> set[int]:
    return report.damaged_parts() & {part.number for part in opened.store.manifest.parts}


def _check_hope(staging: LocalStaging, opened: Opened, report: Report) -> None:
    """Raise UserError for a problem that to make something again would not mend: the bytes are
    those that were written."""
    for problem in report.found:
        if (problem.part, problem.array, problem.group) == (None, None, None):
            raise _hopeless(staging, problem.line, opened.store.identity)


def _hopeless(staging: LocalStaging, why: str, identity: Mapping[str, Any]) -> UserError:
    both = ""
    if isinstance(staging, Hdf5Staging) and staging.parts.exists():
        both = f" and {staging.parts}"
    return UserError(
        f"{staging.path}: {why.removeprefix(f'{staging.path}: ')}; nothing that is left of it can"
        f" mend this: restore it from a copy, or remove it{both} and type the command that made it"
        f" again ({making_command(identity)})"
    )


def _mend(staging: LocalStaging, opened: Opened, report: Report, lease: Lease) -> bool:
    """Take what is damaged out of the store; finish it if nothing is lacking then. Returns whether
    it is finished."""
    entries = {name: entry.to_json() for name, entry in opened.store.manifest.arrays.items()}
    attributes = {key: v for key, v in opened.attributes.items() if key != "checksum"}
    attributes |= {"state": "writing", "version": VERSIONS[0], "arrays": entries}
    aside = Aside(staging.path)
    Unsealing(opened.store, attributes, report, lease).run(staging, opened.sealed, aside)
    opened.store.close()
    report.aside = aside.path if aside.used else None
    if aside.used:
        report.undo = aside.undo()
    lacking = report.lost_outside() or any(p.part is not None for p in report.found if not p.group)
    if lacking or not opened.sealed:
        return False
    staging.mark = lease.token
    # Seal it again, if that gives the manifest, or the checksum of it, that it had: then nothing of
    # it is lacking.
    with closing(staging.source()) as source:
        made, data = sealed_root(source, attributes, check_root(attributes, str(staging.path)))
    if data != opened.manifest and made["checksum"] != opened.checksum:
        return False
    StoreWriter(staging, attributes, lease).seal()
    return True


def _advice(opened: Opened, report: Report, left: int, whole: bool) -> str:
    """What became of the store, and what to do next, as a line; "" if it was sound and is."""
    lines, what = [], making_command(opened.store.identity)
    if whole and report.found:
        lines.append("mended: all that was damaged is known from the rest of the store")
    elif not whole and report.found:
        lines.append(
            f"{counted(left, 'sound part')} kept; type the command that made it again ({what}): it"
            " makes just what is lacking"
        )
    elif not whole:
        lines.append(f"is not finished; type the command that makes it again ({what})")
    if report.aside:
        lines.append(
            f"what was damaged is now in {report.aside}: remove that when the store is sound, or"
            f" undo this by: {report.undo}"
        )
    return "; ".join(lines)


class Unsealing:
    """What is kept of a store, and how it becomes an unfinished store of just that.

    `attributes` are those of the root of the unfinished store.
    """

    def __init__(
        self, store: FeatureStore, attributes: dict[str, Any], report: Report, lease: Lease
    ) -> None:
        self.store, self.attributes, self.report, self._lease = store, attributes, report, lease
        lost = report.damaged_parts()
        self.parts = [part for part in store.manifest.parts if part.number not in lost]
        self.outside = [n for n in store.manifest.arrays if n not in report.lost_outside()]

    def run(self, staging: LocalStaging, sealed: bool, aside: Aside) -> None:
        """Move what is lost aside, then write root and groups anew. Killed in between, the store is
        never sealed with what is damaged, and another repair goes on."""
        if not isinstance(staging, Hdf5Staging):
            self._zarr(staging.path, aside)
        elif sealed:
            self._sealed_hdf5(staging, aside)
        else:
            self._begun_hdf5(staging, aside)

    def _zarr(self, path: Path, aside: Aside) -> None:
        kept = {part.number for part in self.parts}
        aside.move_link_out(path / "parts")
        (path / "parts").mkdir(exist_ok=True)
        for entry in sorted((path / "parts").iterdir()):
            if (number := part_number(entry.name)) is not None and number not in kept:
                aside.move(entry)
        for name in sorted(self.report.lost_outside()):
            aside.move(path / name)
        self._lease.check()
        for group, attributes in sorted(self._groups().items()):
            _write_group(path, group, attributes, aside)
        _write_group(path, "", self.attributes, aside)
        aside.move(path / "manifest")

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Attributes of the groups that are written anew: those outside the parts, and those of
        kept parts that have a problem."""
        groups: dict[str, dict[str, Any]] = {
            group: {} for name in self.outside for group in groups_above(name)
        }
        told = {problem.group for problem in self.report.found}
        for part in self.parts:
            here = f"parts/{part.number}"
            inner = {g for name in part.arrays for g in groups_above(f"{here}/{name}")} - {here}
            groups |= {group: {} for group in inner & told}
            if here in told:
                groups[here] = {"part": part.to_json()}
        return {**groups, "parts": {}}

    def _sealed_hdf5(self, staging: Hdf5Staging, aside: Aside) -> None:
        staging.parts.mkdir(exist_ok=True)
        self._drop_others(staging, aside)
        for part in self.parts:
            self._write_part(staging, part)
        self._replace(staging, aside)

    def _drop_others(self, staging: Hdf5Staging, aside: Aside) -> None:
        kept = {part.number for part in self.parts}
        for number in sorted(staging.published() - kept):
            aside.move(staging.parts / f"{number}.h5")

    def _begun_hdf5(self, staging: Hdf5Staging, aside: Aside) -> None:
        self._drop_others(staging, aside)
        altered = {problem.part for problem in self.report.found}
        for part in self.parts:
            if part.number in altered:
                aside.keep(staging.parts / f"{part.number}.h5")
                self._write_part(staging, part)
        if any(problem.part is None for problem in self.report.found):
            self._replace(staging, aside)

    def _replace(self, staging: Hdf5Staging, aside: Aside) -> None:
        """Write the file of an unfinished store and put it in place of the old one."""
        new = staging.path.with_name(f".{staging.path.name}.new-repair-{_random()}")
        begun = Hdf5Sink(new)
        begun.attributes("parts", {})
        for name in self._in_order(staging):
            values = self.store.outside(name)
            begun.array(name, teacher_array(values), values)
        begun.attributes("", self.attributes)
        begun.close()
        self._lease.check()
        aside.keep(staging.path)
        files.rename(new, staging.path)

    def _in_order(self, staging: Hdf5Staging) -> list[str]:
        """The arrays outside the parts in the order of the file, so that a store that is finished
        again has its bytes back."""
        found: list[str] = []
        for group in sorted(OUTSIDE):
            with suppress(StoreError):  # damaged: any order will do
                found += Hdf5Source(str(staging.path)).arrays(group)
        order = {name: place for place, name in enumerate(found)}
        return sorted(self.outside, key=lambda name: order.get(name, len(order)))

    def _write_part(self, staging: Hdf5Staging, part: Part) -> None:
        """Publish a part anew, array by array: HDF5 would copy whatever lies in its groups, and a
        file that was made for it crashes it."""
        here = f"parts/{part.number}"
        new = staging.parts / f"{NEW}{_random()}-{part.number}.h5"
        sink = Hdf5Sink(new, prefix=here)
        for name, spec in part_arrays(self.store.features, part.counts).items():
            array = self.store.source.array(f"{here}/{name}")
            sink.array(name, spec, array.read(0, spec.shape[0]))
        sink.attributes("", {"part": part.to_json()})
        sink.close()
        files.rename(new, staging.parts / f"{part.number}.h5")


def _random() -> str:
    """Return what nobody can guess of a temporary name: in an untrusted folder, a link of that name
    would lead a write outside."""
    return secrets.token_hex(8)


def _write_group(path: Path, group: str, attributes: dict[str, Any], aside: Aside) -> None:
    """Write the metadata of a group, unless they are there already."""
    target = path / group / "zarr.json"
    data = json.dumps(GROUP | {"attributes": attributes}, indent=1)
    if target.is_file() and not target.is_symlink() and target.read_bytes() == data.encode():
        return
    new = path / f"{NEW}{_random()}"
    new.write_text(data, "utf-8")
    files.sync(new)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        aside.move(target)
    else:
        aside.keep(target)
    files.rename(new, target)


def asides(store: Path) -> list[Path]:
    """The folders beside a store into which something of it was moved."""
    real = store.resolve() if store.is_dir() else store.absolute()
    names = re.compile(rf"{re.escape(real.name)}\.aside-\d+")
    return sorted(path for path in real.parent.iterdir() if names.fullmatch(path.name))


class Aside:
    """The folder `<name>.aside-<n>` beside a store, made when something first goes there.

    Inside, everything has the path that it had beside the store, so that copying the folder over
    the store's own undoes a repair.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._real = store.resolve() if store.is_dir() else store.absolute()  # beside the data
        names = (f"{self._real.name}.aside-{number}" for number in itertools.count(1))
        places = (self._real.with_name(name) for name in names)
        self.path = next(place for place in places if not os.path.lexists(place))

    @property
    def used(self) -> bool:
        return self.path.is_dir()

    def move(self, path: Path) -> None:
        """Move a file or folder there; nothing happens if there is none. Of what a link gives out
        of the store, the link goes."""
        for above in (*reversed(path.parents), path):
            if above.is_relative_to(self._store) and self._leads_out(above):
                path = above
                break
        if os.path.lexists(path):
            files.rename(path, self._place(path))

    def move_link_out(self, path: Path) -> None:
        """Move a link there if it leads out of the store: nobody looks where it leads."""
        if self._leads_out(path):
            self.move(path)

    def _leads_out(self, path: Path) -> bool:
        """Tell whether a path is a link out of the store, or to nothing, such as to itself."""
        if path == self._store or not path.is_symlink():
            return False
        real = Path(os.path.realpath(path))  # pathlib's resolve raises RuntimeError for a circle
        return not path.exists() or not real.is_relative_to(self._real)

    def keep(self, path: Path) -> None:
        """Keep a file that is replaced in one step: by a link, or a copy where links cannot be."""
        if os.path.lexists(path):
            place = self._place(path)
            try:
                os.link(path, place)
            except OSError:
                shutil.copy2(path, place)
                files.sync(place)
            files.sync(place.parent)

    def _place(self, path: Path) -> Path:
        if path.is_relative_to(self._store):
            place = self.path / self._real.name / path.relative_to(self._store)
        else:
            place = self.path / path.relative_to(self._store.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def undo(self) -> str:
        """The command that puts everything back."""
        return shlex.join(["cp", "-a", f"{self.path}/.", f"{self._real.parent}/"])
