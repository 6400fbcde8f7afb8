"""Make a store with damage an unfinished one, without what is damaged."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from teachonce.store.containers.hdf5.file import Hdf5Sink
from teachonce.store.containers.hdf5.staging import OUTSIDE, Hdf5Staging
from teachonce.store.containers.hdf5.tree import Hdf5Source
from teachonce.store.containers.paths import LocalStaging
from teachonce.store.containers.zarr.tree import GROUP
from teachonce.store.errors import StoreError
from teachonce.store.format.layout import groups_above, part_arrays, part_number, teacher_array
from teachonce.store.format.manifest import Part
from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.aside import Aside
from teachonce.store.tools.report import Report
from teachonce.support import files
from teachonce.support.lease import Lease

NEW = ".tmp-repair-"  # FORMAT.md, section 9: such names are a killed writer's, and removed


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
        new = staging.path.with_name(f".{staging.path.name}.new-repair")
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
        here, new = f"parts/{part.number}", staging.parts / f"{NEW}{part.number}.h5"
        sink = Hdf5Sink(new, prefix=here)
        for name, spec in part_arrays(self.store.features, part.counts).items():
            array = self.store.source.array(f"{here}/{name}")
            sink.array(name, spec, array.read(0, spec.shape[0]))
        sink.attributes("", {"part": part.to_json()})
        sink.close()
        files.rename(new, staging.parts / f"{part.number}.h5")


def _write_group(path: Path, group: str, attributes: dict[str, Any], aside: Aside) -> None:
    """Write the metadata of a group, unless they are there already."""
    target = path / group / "zarr.json"
    data = json.dumps(GROUP | {"attributes": attributes}, indent=1)
    if target.is_file() and not target.is_symlink() and target.read_bytes() == data.encode():
        return
    new = path / f"{NEW}group"
    new.write_text(data, "utf-8")
    files.sync(new)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        aside.move(target)
    else:
        aside.keep(target)
    files.rename(new, target)
