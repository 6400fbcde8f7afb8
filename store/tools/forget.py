"""Take documents out of a store for good: the parts that hold them are written again without them.

A Zarr store stays what it is while the new parts are written beside the old ones. Then its root
says that it is unfinished, and which parts are to be replaced; no reader takes it for sound until
they are, and it is sealed again. An HDF5 file is written again beside the old one, and replaces it
in one step.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store.containers.hdf5.staging import Hdf5Staging
from teachonce.store.containers.paths import LocalStaging, local_staging_of
from teachonce.store.containers.zarr.staging import ZarrStaging
from teachonce.store.containers.zarr.tree import shard_path
from teachonce.store.errors import MISSING, StoreError
from teachonce.store.extras.word_counts import GROUP as WORDS
from teachonce.store.format.identity import format_runs, parse_runs
from teachonce.store.format.layout import VERSIONS
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.copy import begin_copy, contents_of, take_part
from teachonce.store.tools.documents import document_numbers, document_texts, stored_digests
from teachonce.store.tools.repair import quarantines_of
from teachonce.store.tools.text_copies import remove_caches
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import write_part
from teachonce.store.write.writer import StoreWriter
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease

FORGETTING = "forgetting"
"""Root attribute of a Zarr store in which parts are being replaced."""
SHOWN = 3  # unknown documents in a line
Progress = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Wanted:
    """The documents to forget: by number, by SHA-256 of their texts (hexadecimal), or by hash of
    their sequences without labels (`document_digests`); with words for each, for a person."""

    numbers: Mapping[int, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Forgotten:
    """What was done: documents and sequences that are gone now, documents that were not there, and
    parts whose files another store shares; caches of the text that were removed, and the text key
    that the store had (see `Manifest.text_key`)."""

    documents: int
    sequences: int
    unknown: tuple[str, ...] = ()
    shared: int = 0
    removed: tuple[str, ...] = ()
    text: str = ""

    def lines(self, path: str) -> Iterator[str]:
        """Tell it in lines."""
        yield from (f"not in the store: {line}" for line in self.unknown)
        documents = counted(self.documents, "document")
        yield f"{path}: forgot {documents} with {counted(self.sequences, 'sequence')}"
        yield from (f"removed {cache}" for cache in self.removed)
        if self.shared:
            yield (
                f"{counted(self.shared, 'part')} of these are in another store, too, which grew"
                " from this one or from which this one grew: forget there as well"
            )


def forget(
    path: str | Path,
    request: str,
    wanted: Callable[[FeatureStore], Wanted],
    missing_ok: bool = False,
    before: Callable[[FeatureStore], object] = lambda store: None,
    progress: Progress = iter,
) -> Forgotten:
    """Remove documents from a sealed store on a disk; the others keep their numbers.

    `wanted` tells which, of the open store, and `request` is a word by which the same wish is known
    again: after a kill another call with it goes on. `before` is called with the store as it was,
    before anything of it changes. Raises UserError for documents that the store does not
    have, unless they are `missing_ok`, if none would be left, and if copies of parts lie aside;
    StoreError for a store that is unfinished or damaged. The store is then as it was.
    """
    if "://" in str(path):
        raise UserError(
            f"{path}: documents are forgotten in a store on a disk: copy it there with"
            " `feature-store convert`, forget them there, copy it back under another name, and"
            " remove this one with all versions that the bucket keeps"
        )
    staging = local_staging_of(path)
    if not staging.path.exists():
        raise UserError(f"{path}: {MISSING}")
    try:
        with closing(Lease(staging.path)) as lease:
            PartQueue(staging.path).check_idle()
            staging.mark = lease.token
            staging.clear()
            done = _finish(staging, lease)
            if done is not None and done[0] == request:
                return done[1]
            with closing(open_store(path)) as store:
                plan = _plan(store, wanted(store), missing_ok)
                if not plan.numbers:
                    return plan.forgotten
                removed = remove_caches(store)
                before(store)
                _carry_out(staging, plan, lease, request, progress)
            return replace(plan.forgotten, removed=tuple(removed))
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {files.reason(error)}, and type the command again"
        ) from error


@dataclass(frozen=True)
class _Plan:
    """What is to be done to an open store: the documents, and of each part that holds any of them
    which sequences stay, by its place."""

    store: FeatureStore
    numbers: frozenset[int]
    keep: Mapping[int, Array]
    forgotten: Forgotten


def _plan(store: FeatureStore, wanted: Wanted, missing_ok: bool) -> _Plan:
    """Find the documents. Raises UserError as `forget` does."""
    found, unknown = _found(store, wanted)
    if unknown and not missing_ok:
        more = ", ..." if len(unknown) > SHOWN else ""
        raise UserError(
            f"{store.path}: {counted(len(unknown), 'document')} to forget not in the store"
            f" ({', '.join(unknown[:SHOWN])}{more}), or forgotten before; nothing was changed:"
            " correct the list, or forget the others with --missing-ok"
        )
    numbers = np.array(sorted(found), np.int64)
    keep, left, gone = {}, 0, 0
    for place, documents in enumerate(document_numbers(store)):
        stays = ~np.isin(documents, numbers)
        if not stays.all():
            keep[place] = stays
        left += int(stays.sum())
        gone += len(stays) - int(stays.sum())
    if not left:
        raise UserError(
            f"{store.path}: these are all of its documents, and a store has at least one; nothing"
            " was changed: to forget all of them remove the store"
        )
    if found and (others := quarantines_of(Path(store.path))):
        raise UserError(
            f"{others[0]}: holds what `feature-store repair` moved aside, perhaps with these"
            " documents; nothing was changed: remove it, and type this again"
        )
    shared = sum(_is_shared(store, place) for place in keep)
    text = store.manifest.text_key
    done = Forgotten(len(found), gone, tuple(unknown), shared, text=text)
    return _Plan(store, frozenset(found), keep, done)


def _found(store: FeatureStore, wanted: Wanted) -> tuple[set[int], list[str]]:
    """The numbers of the documents that are wanted, and words for those that are not there; what
    was forgotten before is neither."""
    found, unknown = set[int](), list[str]()
    if wanted.numbers:
        there = np.unique(np.concatenate([np.unique(some) for some in document_numbers(store)]))
        found.update(set(there.tolist()) & wanted.numbers.keys())
        before = parse_runs(_corpus(store.identity).get("forgotten"))
        for number in sorted(wanted.numbers.keys() - found):
            if not any(first <= number <= last for first, last in before):
                unknown.append(wanted.numbers[number])
    if wanted.hashes:
        met = _met(
            ((n, hashlib.sha256(text.encode()).hexdigest()) for n, text in document_texts(store)),
            wanted.hashes, found,
        )  # fmt: skip
        unknown += [told for key, told in wanted.hashes.items() if key not in met]
    if wanted.digests:
        met_digests = _met(stored_digests(store, gold=False), wanted.digests, found)
        unknown += [told for key, told in wanted.digests.items() if key not in met_digests]
    return found, unknown


def _met(documents: Iterator[tuple[int, Any]], keys: Collection[Any], found: set[int]) -> set[Any]:
    """Add the numbers of the documents that have one of the keys; returns the keys that some
    have."""
    met = set()
    for number, key in documents:
        if key in keys:
            found.add(number)
            met.add(key)
    return met


def _is_shared(store: FeatureStore, place: int) -> bool:
    """Whether the text of a part is a file of another store, too."""
    part = store.manifest.parts[place]
    file = Path(store.path) / "parts" / str(part.number)
    file /= shard_path("text/utf8", part.arrays["text/utf8"].shape)
    return file.is_file() and file.stat().st_nlink > 1


def _corpus(identity: Mapping[str, Any]) -> dict[str, Any]:
    corpus = identity.get("corpus")
    return dict(corpus) if isinstance(corpus, Mapping) else {"source": corpus}


def _identity(plan: _Plan) -> dict[str, Any]:
    """The identity of the store without the documents. It tells their numbers: a hash of a short
    text would tell the text."""
    corpus = _corpus(plan.store.identity)
    runs = [*parse_runs(corpus.get("forgotten")), *((n, n) for n in plan.numbers)]
    return {**plan.store.identity, "corpus": {**corpus, "forgotten": format_runs(runs)}}


def _carry_out(
    staging: LocalStaging, plan: _Plan, lease: Lease, request: str, progress: Progress
) -> None:
    if isinstance(staging, Hdf5Staging):
        _rewrite(staging, plan, lease, progress)
        return
    staging.drop_kept()
    gone = {}
    try:
        for place, keep in progress(list(plan.keep.items())):
            number = plan.store.manifest.parts[place].number
            gone[number] = not keep.any()
            if keep.any():  # what stays of a part is written beside it
                counts, arrays = contents_of(plan.store.part(place), keep)
                lease.check()
                write_part(staging.part(number), plan.store.features, number, counts, arrays)
                staging.keep(number)
        lease.check()
        attributes = _unsealed(staging, plan)
    except (Exception, KeyboardInterrupt):
        staging.clear(staging.mark)
        staging.drop_kept()
        raise
    told = {
        "request": request,
        "replaced": sorted(number for number, all_of_it in gone.items() if not all_of_it),
        "gone": sorted(number for number, all_of_it in gone.items() if all_of_it),
        "documents": plan.forgotten.documents,
        "sequences": plan.forgotten.sequences,
        "shared": plan.forgotten.shared,
        "text": plan.forgotten.text,
    }
    staging.unseal(attributes | {FORGETTING: told})
    plan.store.close()
    _finish(staging, lease)


def _unsealed(staging: ZarrStaging, plan: _Plan) -> dict[str, Any]:
    """Root attributes of the unfinished store: without the counts of words, as some of these may
    occur in what is forgotten alone."""
    with closing(staging.source()) as source:
        attributes = {k: v for k, v in source.attributes().items() if k != "checksum"}
    entries = {
        name: entry.to_json()
        for name, entry in plan.store.manifest.arrays.items()
        if not name.startswith(f"{WORDS}/")
    }
    made = {"state": "writing", "version": VERSIONS[0], "arrays": entries}
    return attributes | made | {"identity": _identity(plan)}


def _finish(staging: LocalStaging, lease: Lease) -> tuple[str, Forgotten] | None:
    """Go on with a Zarr store whose root tells what is to be replaced; returns the request and what
    it did. None for any other store."""
    attributes = StoreWriter.peek(staging.path)
    told = attributes.get(FORGETTING) if attributes else None
    if not isinstance(staging, ZarrStaging) or attributes is None or told is None:
        return None
    try:
        replaced, gone = ([int(n) for n in told[key]] for key in ("replaced", "gone"))
        counts = (int(told[key]) for key in ("documents", "sequences", "shared"))
        documents, sequences, shared = counts
        done = Forgotten(documents, sequences, (), shared, text=str(told.get("text", "")))
        request = str(told["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{staging.path}: its attribute {FORGETTING} is not valid; restore the store from a"
            " copy"
        ) from error
    lease.check()
    staging.replace(replaced + gone, set(gone))
    for name in ("manifest", "index", WORDS):  # sealing makes the first two anew
        shutil.rmtree(staging.path / name, ignore_errors=True)
    staging.clear()
    rest = {key: value for key, value in attributes.items() if key != FORGETTING}
    StoreWriter(staging, rest, lease).seal(release=False)
    return request, done


def _rewrite(staging: Hdf5Staging, plan: _Plan, lease: Lease, progress: Progress) -> None:
    """Write an HDF5 file without the documents, and put it in place of the old one."""
    staging.clean()
    try:
        work = staging.path.with_name(f".{staging.path.name}.new-{lease.token}")
        work.mkdir()
        store, new = plan.store, work / staging.path.name
        kept = [
            place
            for place in range(len(store.manifest.parts))
            if place not in plan.keep or plan.keep[place].any()
        ]
        numbers = [store.manifest.parts[place].number for place in kept]
        identity = _identity(plan)
        with closing(
            begin_copy(new, store, store.features, identity, numbers, words=False)
        ) as writer:
            for place, number in progress(list(zip(kept, numbers, strict=True))):
                take_part(writer, number, store, place, plan.keep.get(place))
            writer.seal()
        store.close()
        lease.check()
        files.rename(new, staging.path)
    finally:
        staging.clear(staging.mark)
