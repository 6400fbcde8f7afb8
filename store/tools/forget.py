"""Remove documents from a store permanently: the parts that hold them are written again.

While the new parts of a Zarr store are written next to the old ones, the store is unchanged. Then
its root is marked as unfinished, with the list of parts to replace. Readers refuse it until the
parts are replaced and the store is sealed again. An HDF5 file is written again next to the old one,
and replaces it by one rename.
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
from teachonce.store.errors import StoreError, missing
from teachonce.store.extras.word_counts import GROUP as WORDS
from teachonce.store.format.identity import format_runs, parse_runs
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.copy import Progress, begin_copy, contents_of, take_part
from teachonce.store.tools.document_hashes import document_numbers, document_texts, stored_digests
from teachonce.store.tools.repair import quarantines_of, unsealed
from teachonce.store.tools.text_copies import remove_caches
from teachonce.store.write.part_queue import PartQueue
from teachonce.store.write.tree import write_part_tree
from teachonce.store.write.writer import StoreWriter
from teachonce.support import files
from teachonce.support.arrays import Array
from teachonce.support.console import counted
from teachonce.support.errors import UserError
from teachonce.support.lease import Lease

FORGETTING = "forgetting"
"""Root attribute of a Zarr store in which parts are being replaced."""
SHOWN = 3  # unknown documents in a line


@dataclass(frozen=True)
class DocumentsToForget:
    """Lists the documents to forget. Each field maps keys of documents to descriptions for
    messages.

    numbers: keys are document numbers. hashes: keys are hexadecimal SHA-256 of texts. digests: keys
        are hashes of a document's sequences without labels (`document_digests`).
    """

    numbers: Mapping[int, str] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Forgotten:
    """Holds the result of `forget`.

    documents, sequences: the numbers removed. unknown: requested documents that were not found.
        shared: the number of parts whose files another store shares. removed: caches of the text
        that were deleted. text: text key of the store before the call (see `Manifest.text_key`).
    """

    documents: int
    sequences: int
    unknown: tuple[str, ...] = ()
    shared: int = 0
    removed: tuple[str, ...] = ()
    text: str = ""

    def lines(self, path: str) -> Iterator[str]:
        """Yield the result as lines of text."""
        yield from (f"not in the store: {line}" for line in self.unknown)
        documents = counted(self.documents, "document")
        yield f"{path}: forgot {documents} with {counted(self.sequences, 'sequence')}"
        yield from (f"removed {cache}" for cache in self.removed)
        if self.shared:
            yield (
                f"another store shares the files of {counted(self.shared, 'part')} that held the"
                " documents: it grew from this store, or this store from it, or it is a copy by"
                " hard links; forget there as well"
            )


def forget(
    path: str | Path,
    request: str,
    wanted: Callable[[FeatureStore], DocumentsToForget],
    missing_ok: bool = False,
    before: Callable[[FeatureStore], object] = lambda store: None,
    progress: Progress = iter,
) -> Forgotten:
    """Remove documents from a sealed store on a disk; the others retain their numbers.

    wanted: returns the documents, given the open store.
    request: identifies the call; after a kill, another call with the same one continues.
    before: called with the open store before anything is changed.

    Raises UserError for documents that the store does not have (unless `missing_ok`), if no
    document would remain, and if a quarantine folder of `repair` exists; StoreError for an
    unfinished or damaged store. In these cases the store is unchanged.
    """
    if "://" in str(path):
        raise UserError(
            f"{path}: `feature-store forget` works on a local disk only: copy the store there with"
            " `feature-store convert`, forget the documents in the copy, upload it under another"
            " name, and delete this store with all versions that the bucket stores"
        )
    staging = local_staging_of(path)
    if not staging.path.exists():
        raise UserError(missing(path))
    try:
        with closing(staging.lease()) as lease:
            PartQueue(staging.path).check_idle()
            staging.clear()
            # A killed call is finished first, whatever it was to forget: until then no reader opens
            # the store.
            done = _finish(staging, lease)
            if done is not None and done[0] == request:
                return done[1]
            with closing(open_store(path)) as store:
                plan = _find_removal(store, wanted(store), missing_ok)
                if not plan.numbers:
                    return plan.forgotten
                # Before the change: caches are named by the text that the store has now.
                removed = remove_caches(store)
                before(store)
                _carry_out(staging, plan, lease, request, progress)
            return replace(plan.forgotten, removed=tuple(removed))
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written: {files.reason(error)}, and run the command again"
        ) from error


@dataclass(frozen=True)
class _Removal:
    """Lists what to remove from an open store.

    numbers: document numbers. remaining: for each affected part, by its index, bool [n]: the
        sequences that remain.
    """

    store: FeatureStore
    numbers: frozenset[int]
    remaining: Mapping[int, Array]
    forgotten: Forgotten


def _find_removal(store: FeatureStore, request: DocumentsToForget, missing_ok: bool) -> _Removal:
    """Find the documents and the sequences to remove. Raises UserError as `forget` does."""
    doc_numbers, unknown = _find_documents(store, request)
    if unknown and not missing_ok:
        dots = ", ..." if len(unknown) > SHOWN else ""
        raise UserError(
            f"{store.path}: cannot forget {counted(len(unknown), 'document')} that the store does"
            f" not have ({', '.join(unknown[:SHOWN])}{dots}), perhaps because of an earlier"
            " request; nothing was changed: correct the list, or add --missing-ok to forget the"
            " others"
        )
    numbers = np.array(sorted(doc_numbers), np.int64)
    remaining, retained, removed = {}, 0, 0
    for index, documents in enumerate(document_numbers(store)):
        keep = ~np.isin(documents, numbers)
        if not keep.all():
            remaining[index] = keep
        retained += int(keep.sum())
        removed += len(keep) - int(keep.sum())
    if not retained:
        raise UserError(
            f"{store.path}: the request names all documents of the store, but at least one must"
            " remain; nothing was changed: to forget all of them, delete the store"
        )
    if doc_numbers and (quarantines := quarantines_of(Path(store.path))):
        raise UserError(
            f"{quarantines[0]}: holds what `feature-store repair` quarantined, perhaps with these"
            " documents; nothing was changed: delete this folder, and run the command again"
        )
    shared = sum(_is_shared(store, index) for index in remaining)
    text = store.manifest.text_key
    done = Forgotten(len(doc_numbers), removed, tuple(unknown), shared, text=text)
    return _Removal(store, frozenset(doc_numbers), remaining, done)


def _find_documents(store: FeatureStore, request: DocumentsToForget) -> tuple[set[int], list[str]]:
    """Return the numbers of the documents to forget, and the descriptions of documents that were
    not found.

    Documents that were forgotten earlier are in neither list.
    """
    numbers, unknown = set[int](), list[str]()
    if request.numbers:
        stored = np.unique(np.concatenate([np.unique(part) for part in document_numbers(store)]))
        numbers.update(set(stored.tolist()) & request.numbers.keys())
        forgotten = parse_runs(_corpus(store.identity).get("forgotten"))
        for number in sorted(request.numbers.keys() - numbers):
            if not any(first <= number <= last for first, last in forgotten):
                unknown.append(request.numbers[number])
    if request.hashes:
        hashes = _find_keys(
            ((n, hashlib.sha256(text.encode()).hexdigest()) for n, text in document_texts(store)),
            request.hashes, numbers,
        )  # fmt: skip
        unknown += [label for key, label in request.hashes.items() if key not in hashes]
    if request.digests:
        # A request has texts without gold labels, so the digests are compared without labels.
        digests = _find_keys(stored_digests(store, gold=False), request.digests, numbers)
        unknown += [label for key, label in request.digests.items() if key not in digests]
    return numbers, unknown


def _find_keys(
    documents: Iterator[tuple[int, Any]], keys: Collection[Any], numbers: set[int]
) -> set[Any]:
    """Add to `numbers` the numbers of documents that have one of `keys`; return the keys that
    were found."""
    present = set()
    for number, key in documents:
        if key in keys:
            numbers.add(number)
            present.add(key)
    return present


def _is_shared(store: FeatureStore, index: int) -> bool:
    """Return whether another store shares the file with the text of a part, by a hard link."""
    # Parts are linked as a whole (`StoreWriter.adopt_part`), so one file shows whether they are
    # shared.
    part, file = store.manifest.parts[index], Path(store.path)
    if file.is_dir():
        file = file / "parts" / str(part.number)
        file /= shard_path("text/utf8", part.arrays["text/utf8"].shape)
    return file.is_file() and file.stat().st_nlink > 1


def _corpus(identity: Mapping[str, Any]) -> dict[str, Any]:
    corpus = identity.get("corpus")
    return dict(corpus) if isinstance(corpus, Mapping) else {"source": corpus}


def _identity(plan: _Removal) -> dict[str, Any]:
    """Return the identity of the store without the documents."""
    # Numbers, not hashes of texts: trying texts would reveal a short one from its hash.
    corpus = _corpus(plan.store.identity)
    runs = [*parse_runs(corpus.get("forgotten")), *((n, n) for n in plan.numbers)]
    return {**plan.store.identity, "corpus": {**corpus, "forgotten": format_runs(runs)}}


def _carry_out(
    staging: LocalStaging, plan: _Removal, lease: Lease, request: str, progress: Progress
) -> None:
    if isinstance(staging, Hdf5Staging):
        _rewrite(staging, plan, lease, progress)
        return
    # A call that was killed before it unsealed the store may have left replacements.
    staging.discard_replacements()
    emptied = {}
    try:
        for index, keep in progress(list(plan.remaining.items())):
            number = plan.store.manifest.parts[index].number
            emptied[number] = not keep.any()
            if keep.any():
                counts, arrays = contents_of(plan.store.part(index), keep)
                lease.check()
                write_part_tree(staging.part(number), plan.store.features, number, counts, arrays)
                staging.stage_replacement(number)
        lease.check()
        attributes = _unsealed(staging, plan)
    except (Exception, KeyboardInterrupt):
        staging.clear(staging.mark)
        staging.discard_replacements()
        raise
    journal = {
        "request": request,
        "replaced": sorted(number for number, empty in emptied.items() if not empty),
        "gone": sorted(number for number, empty in emptied.items() if empty),
        "documents": plan.forgotten.documents,
        "sequences": plan.forgotten.sequences,
        "shared": plan.forgotten.shared,
        "text": plan.forgotten.text,
    }
    # A kill before this line leaves the store as it was. After it, the next call finishes by the
    # journal.
    staging.replace_root(attributes | {FORGETTING: journal})
    plan.store.close()
    _finish(staging, lease)


def _unsealed(staging: ZarrStaging, plan: _Removal) -> dict[str, Any]:
    """Return the root attributes with which the store becomes unfinished, without the removed
    documents."""
    # Without the word counts: some words may occur in the forgotten documents alone.
    with closing(staging.source()) as source:
        attributes = source.attributes()
    arrays = plan.store.manifest.arrays
    remaining = {name: arrays[name] for name in arrays if not name.startswith(f"{WORDS}/")}
    return unsealed(attributes, remaining) | {"identity": _identity(plan)}


def _finish(staging: LocalStaging, lease: Lease) -> tuple[str, Forgotten] | None:
    """Finish a Zarr store whose root lists parts to replace; return the request and its result.

    Returns None for any other store.
    """
    attributes = StoreWriter.peek(staging.path)
    journal = attributes.get(FORGETTING) if attributes else None
    if not isinstance(staging, ZarrStaging) or attributes is None or journal is None:
        return None
    try:
        # The root of a store is untrusted, and these numbers become names of folders.
        replaced, emptied = ([int(n) for n in journal[key]] for key in ("replaced", "gone"))
        counts = (int(journal[key]) for key in ("documents", "sequences", "shared"))
        documents, sequences, shared = counts
        done = Forgotten(documents, sequences, (), shared, text=str(journal.get("text", "")))
        request = str(journal["request"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # int(inf) overflows
        raise StoreError(
            f"{staging.path}: its attribute {FORGETTING} is not valid; restore the store from a"
            " copy"
        ) from error
    lease.check()
    staging.replace(replaced + emptied, set(emptied))
    for name in ("manifest", "index", WORDS):  # sealing writes the first two again
        shutil.rmtree(staging.path / name, ignore_errors=True)
    staging.clear()
    remaining = {key: value for key, value in attributes.items() if key != FORGETTING}
    # `forget` may go on under this lease, with another request.
    StoreWriter(staging, remaining, lease).seal(release=False)
    return request, done


def _rewrite(staging: Hdf5Staging, plan: _Removal, lease: Lease, progress: Progress) -> None:
    """Write an HDF5 file without the documents, and rename it over the old one."""
    staging.clean()
    try:
        # A folder, because the writer puts its lease and its parts next to the new file. Its
        # name marks a temporary file (FORMAT.md, section 9), so a later call removes it.
        work = staging.path.with_name(f".{staging.path.name}.new-{lease.token}")
        work.mkdir()
        store, new = plan.store, work / staging.path.name
        indices = [
            index
            for index in range(len(store.manifest.parts))
            if index not in plan.remaining or plan.remaining[index].any()
        ]
        numbers = [store.manifest.parts[index].number for index in indices]
        identity = _identity(plan)
        with closing(
            begin_copy(new, store, store.features, identity, numbers, words=False)
        ) as writer:
            for index, number in progress(list(zip(indices, numbers, strict=True))):
                take_part(writer, number, store, index, plan.remaining.get(index))
            writer.seal()
        store.close()
        lease.check()
        files.rename(new, staging.path)
    finally:
        staging.clear(staging.mark)
