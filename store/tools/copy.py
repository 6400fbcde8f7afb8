"""Copy a store, or some sequences of its parts: to another store, file format, codec or URL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store.containers.network import ABSENT
from teachonce.store.containers.paths import check_url_name
from teachonce.store.containers.zarr.files import RemoteFiles, remote_files
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.errors import StoreError
from teachonce.store.extras.mixed_vocab import MixedVocab
from teachonce.store.extras.word_counts import WordCounts
from teachonce.store.format.features import Features
from teachonce.store.format.layout import Counts, dimension_names, span_kind
from teachonce.store.format.manifest import digest
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.read.part import DAMAGED, PartReader
from teachonce.store.read.part_laws import check_values
from teachonce.store.read.store import FeatureStore, open_store
from teachonce.store.tools.recode import ENCODED, check_codec, recode_part, same_calibration
from teachonce.store.tools.verify import outside_entries, verify_store
from teachonce.store.write.writer import StoreWriter
from teachonce.support.arrays import Array, ranges, starts
from teachonce.support.errors import ANOTHER, UserError

DOCUMENT = "sequence/document"
ROOT = "zarr.json"
Progress = Callable[[Sequence[Any]], Any]


def contents_of(part: PartReader, chosen: Array | None = None) -> tuple[Counts, dict[str, Array]]:
    """Read the counts and arrays of a part, or of its `chosen` sequences (bool [n]).

    Raises StoreError for an array that does not match its checksum.
    """
    arrays = {name: part.all(name) for name in part.names()}
    return (part.part.counts, arrays) if chosen is None else selected(arrays, part.features, chosen)


def selected(
    arrays: Mapping[str, Array], features: Features, chosen: Array
) -> tuple[Counts, dict[str, Array]]:
    """Return counts and arrays of the `chosen` sequences (bool [n]) of a part.

    arrays: all arrays of the part, by path. The name of their first dimension (FORMAT.md, section
    6) determines which rows belong to a sequence.
    """
    lengths = np.diff(arrays["sequence/token_start"])
    sequences = np.flatnonzero(chosen)
    tokens = _rows_of(starts(lengths), sequences)
    rows = {"sequence": sequences, "token": tokens}
    subset = {}
    for name, array in arrays.items():
        kind = dimension_names(name, array.ndim)[0]
        if kind.endswith("_edge"):
            subset[name] = starts(np.diff(array)[rows[kind.removesuffix("_edge")]])
        elif kind in rows:
            subset[name] = array[rows[kind]]
        elif kind == "distinct_id":  # it may hold ids that no token has
            subset[name] = array
        else:
            subset[name] = array[_rows_of(*_ragged(name, kind, arrays, lengths, rows))]
    return _counts(features, subset), subset


def _ragged(
    name: str, kind: str, arrays: Mapping[str, Array], lengths: Array, rows: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Return the first row of each sequence (or token) in an array, and the sequences (or tokens)
    to copy."""
    group = name.rpartition("/")[0]
    if kind == "byte":
        return arrays["sequence/text_start"], rows["sequence"]
    if kind == "token_pair":
        return starts(lengths**2), rows["sequence"]
    of = {"masked_word": "sequence", "message": "sequence", "draw": "token"}[kind]
    return arrays[f"{group}/start"], rows[of]


def _rows_of(start: Array, rows: Array) -> Array:
    return ranges(start[rows], np.diff(start)[rows])


def _counts(features: Features, arrays: Mapping[str, Array]) -> Counts:
    lengths = np.diff(arrays["sequence/token_start"])

    def ragged(path: Callable[[int], str]) -> tuple[int, ...]:
        return tuple(len(arrays.get(path(view), ())) for view in range(features.views))

    spec = features.logits
    # `Counts.draws` serves both tiers (FORMAT.md, section 8): it counts sampled ids, or distinct
    # ids.
    drawn = {"sample": "logits/ids", "topk": "logits/distinct"}.get(spec.tier if spec else "", "")
    return Counts(
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        squares=int((lengths**2).sum()),
        text_bytes=len(arrays["text/utf8"]),
        spans=ragged(lambda view: f"{span_kind(view).group}/begin"),
        draws=ragged(lambda view: f"view{view}/{drawn}"),
    )


def take_part(
    writer: StoreWriter, number: int, store: FeatureStore, index: int, chosen: Array | None
) -> None:
    """Publish part `index` of `store` as part `number`, unless it is published.

    index: position of the part in the manifest of `store`. chosen: bool [n], the sequences to copy;
        None for all. A whole part of a Zarr folder on the same disk is hard-linked, and its values
        are not read. Raises StoreError for an array that does not match its checksum.
    """
    if number in writer.published:
        return
    if chosen is None and writer.adopts(store):
        writer.adopt_part(number, store, index)
        return
    with store.watch.reporting_changes():
        contents = contents_of(store.part(index), chosen)
    writer.write_part(number, *contents)


def begin_copy(
    path: str | Path,
    store: FeatureStore,
    features: Features,
    identity: dict[str, Any],
    numbers: Iterable[int],
    words: bool = True,
) -> StoreWriter:
    """Start, or continue, a store with everything that `store` holds outside its parts.

    numbers: the part numbers of the new store. words: whether to copy the word counts. Raises
        UserError if the new store was started as a copy of another store.
    """
    head = features.logits is not None and features.logits.tier == "head"
    writer = StoreWriter.create_or_resume(
        path,
        identity,
        features,
        software=store.meta["software"],
        calibration=store.calibration,
        files=store.teacher_files(),
        weights=store.teacher_weights(),  # read one at a time, as they may not fit into memory
        head=store.head() if head else None,
        extras=(MixedVocab.stored(store), WordCounts.stored(store) if words else None),
    )
    checksums = {name: entry.sha256 for name, entry in store.manifest.arrays.items()}
    differing = [name for name, e in writer.outside.items() if e.sha256 != checksums.get(name)]
    # A part that this source lacks was copied from another source.
    differing += [f"part {number}" for number in sorted(writer.published.difference(numbers))]
    if differing:
        writer.close()
        raise UserError(_other_source(path, store, differing[0]))
    return writer


def copy_part(
    writer: StoreWriter, number: int, store: FeatureStore, index: int, target: FeatureStore,
    documents: int,
) -> None:  # fmt: skip
    """Publish the part at `index` of `store` as part `number`, in the codec of `writer`.

    States are encoded with the calibration of `target`, and document numbers are raised by
    `documents`. A part that was published before a stop is compared instead. Raises UserError if it
    came from another source, StoreError if an array of the source does not match its checksum.
    """
    if number in writer.published:
        _check_copied(writer, number, store, index, target, documents)
        return
    with store.watch.reporting_changes():
        # This compares each array with its checksum: the new checksums would hide any damage.
        _, arrays = contents_of(store.part(index))
        # Encoding would turn NaN into an ordinary number, and a wrong place into an ordinary id.
        ranked = store.features.logits != writer.features.logits
        if ranked or not _is_plain(writer, store, target):
            check_values(store.part(index), store.calibration)
    arrays[DOCUMENT] = arrays[DOCUMENT] + documents
    try:
        recoded = recode_part(
            arrays, store.features, writer.features, store.calibration, target.calibration
        )
    except StoreError as error:
        raise StoreError(f"{store.part(index).where}: {error}") from None
    writer.write_part(number, _counts(writer.features, recoded), recoded)


def _check_copied(
    writer: StoreWriter, number: int, store: FeatureStore, index: int, target: FeatureStore,
    documents: int,
) -> None:  # fmt: skip
    """Compare checksums of a published part with its source, except for arrays that were encoded
    again."""
    # Stores of equal identity may have unequal parts: a merge leaves out the arguments that differ,
    # and a GPU may have rounded otherwise.
    published, part = writer.published_part(number).arrays, store.part(index)
    expected = {name: entry.sha256 for name, entry in part.part.arrays.items()}
    expected[DOCUMENT] = digest(part.document + documents)
    plain = _is_plain(writer, store, target)
    # If only one of the two has ranked logits, their ids are in different arrays.
    names = [n for n in published if n in expected and (plain or not ENCODED.fullmatch(n))]
    differing = [name for name in names if published[name].sha256 != expected[name]]
    if differing:
        raise UserError(_other_source(writer.path, store, f"{differing[0]} of part {number}"))


def _is_plain(writer: StoreWriter, store: FeatureStore, target: FeatureStore) -> bool:
    """Return whether values are copied without encoding them again."""
    return store.features.codec == writer.features.codec and same_calibration(
        store.calibration, target.calibration
    )


def _other_source(path: str | Path, store: FeatureStore, difference: str) -> str:
    return (
        f"{path}: was started from another store than {store.path}: {difference} differs;"
        f" continue with the store that it was started from, or {ANOTHER}"
    )


def convert(
    source: str | Path,
    target: str | Path,
    codec: str | None = None,
    progress: Progress = iter,
) -> None:
    """Copy a sealed store to `target` (.zarr or .h5), encoded again if `codec` is another codec.

    Copies one part at a time: memory is bounded by a part. After a stop, another call continues.
    Raises UserError if the codec claims a smaller error than the store has, or if `target` is
    taken; StoreError if the source is damaged.
    """
    with closing(open_store(source)) as store:
        new = codec or store.features.codec
        check_codec(store.path, store.features.codec, new)
        features, parts = store.features.in_codec(new), store.manifest.parts
        numbers = store.manifest.numbers.tolist()
        StoreWriter.check_writable(target)
        # Recorded first: `forget` lists the copy even if this process is killed before it ends.
        record_copy(store.source.address, store.manifest, "store", target)
        with closing(begin_copy(target, store, features, store.identity, numbers)) as writer:
            for index in progress(range(len(parts))):
                copy_part(writer, parts[index].number, store, index, store, 0)
            # Before sealing: parts from before and after a rewriting of the source must not become
            # one store.
            store.watch.check()
            writer.seal()


def upload(
    source: str | Path,
    target: str,
    storage_options: dict[str, Any] | None = None,
    *,
    progress: Progress = iter,
) -> None:
    """Copy a sealed Zarr folder to an fsspec URL.

    The root's `zarr.json`, which marks a store as sealed, is sent last: after a kill every reader
    refuses the copy, and another call copies it again. The size of each file is checked after it is
    sent. The source is verified first; unknown files in it are not copied. Raises UserError if the
    source is not a sealed Zarr folder or the target exists, StoreError if the source is damaged or
    a file arrived truncated, Unreachable if the target does not answer or refuses.
    """
    with closing(open_store(source)) as store:
        if not isinstance(store.source, ZarrSource) or "://" in str(source):
            raise UserError(
                f"{source}: only a Zarr folder can be copied to {target}; convert it to .zarr first"
            )
        remote = _target(target.rstrip("/"), storage_options)
        # Files are copied as they are: damage would arrive under a sealed root.
        if problems := verify_store(store).problems:
            raise StoreError(f"{source}: {problems[0]}; {DAMAGED}")
        record_copy(store.source.address, store.manifest, "address", target)
        groups = range(len(store.manifest.parts) + 1)
        for _, files in zip(progress(groups), stored_files(store), strict=True):
            store.watch.check()  # before the root, which is last
            for name in files:
                data = Path(source, name).read_bytes()
                remote.write(name, data)
                if remote.size(name) != len(data):
                    raise StoreError(f"{target}: {name} arrived incomplete; run the command again")


def _target(target: str, storage_options: dict[str, Any] | None) -> RemoteFiles:
    """Open a URL for writing. Raises UserError as `check_url_name` does and if a store exists
    there, StoreError if the URL cannot be opened."""
    check_url_name(target)
    remote = remote_files(target, storage_options)
    # Without a root there is at most a killed upload, whose objects are replaced. The root is read,
    # not only looked up, because a failed HEAD request gives no reason.
    with suppress(*ABSENT):
        remote.read(ROOT)
        raise UserError(f"{target} exists already; {ANOTHER}")
    return remote


def stored_files(store: FeatureStore) -> Iterator[list[str]]:
    """Yield the paths of the files of each part of a Zarr store, then of those outside the parts,
    the root's last."""
    assert isinstance(store.source, ZarrSource)
    for part in store.manifest.parts:
        prefix = f"parts/{part.number}"
        yield sorted(store.source.files([f"{prefix}/{name}" for name in part.arrays], prefix)[0])
    names = ["manifest", *(name for name, _ in outside_entries(store))]
    yield [*sorted(store.source.files(names)[0] - {ROOT}), ROOT]
