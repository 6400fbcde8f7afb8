"""Move what is damaged of a store aside; the command that made the store makes just this again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.paths import LocalStaging, local_staging_of
from teachonce.store.errors import MISSING, StoreError, without_remedy
from teachonce.store.format.layout import VERSIONS
from teachonce.store.format.manifest import check_root
from teachonce.store.read.unfinished import made_by
from teachonce.store.tools.aside import Aside
from teachonce.store.tools.report import Report
from teachonce.store.tools.salvage import Opened, open_damaged
from teachonce.store.tools.unseal import Unsealing
from teachonce.store.tools.verify import Progress, verify_opened
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import sealed_root
from teachonce.store.write.writer import StoreWriter
from teachonce.support import files
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease


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
        report.advice = _advice(staging, opened, report, left, whole)
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
        f" again ({made_by(identity)})"
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


def _advice(staging: LocalStaging, opened: Opened, report: Report, left: int, whole: bool) -> str:
    """What became of the store, and what to do next, as a line; "" if it was sound and is."""
    lines, what = [], made_by(opened.store.identity)
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
