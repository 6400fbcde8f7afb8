"""Open a store for reading: `open_store` and `FeatureStore`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.cache_option import parse_disk_cache
from teachonce.store.containers.disk_cache import DiskCache
from teachonce.store.containers.interface import StoreSource
from teachonce.store.containers.network import with_refetches
from teachonce.store.containers.paths import open_source
from teachonce.store.errors import StoreError
from teachonce.store.format.features import PROBLEM_TYPES, Calibration, Features, TaskSpec
from teachonce.store.format.identity import object_in
from teachonce.store.format.layout import EMBEDDING
from teachonce.store.format.manifest import Manifest, check_root, suggest_repair
from teachonce.store.format.sequences import split_pair
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.read.manifests import (
    calibration_paths,
    check_calibration,
    check_finite,
    manifest_of,
    published_parts,
    read_outside,
    sealed_manifest,
    unfinished_error,
)
from teachonce.store.read.part import PartReader
from teachonce.store.read.part_index import PartIndex
from teachonce.store.read.record import LazyMap, MissingFeature, Record
from teachonce.store.read.stored_tokenizer import json_object, parse_tokenizer
from teachonce.store.read.stream import Batch, Streamer
from teachonce.store.read.stream_order import KINDS, StreamArguments, StreamOrder, names_of
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted
from teachonce.support.html import html_table
from teachonce.support.parsing import local_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from teachonce.store.read.arrow import StoreTable


def open_store(
    path: str | Path,
    *,
    allow_partial: bool = False,
    storage_options: dict[str, Any] | None = None,
    cache: str | None = None,
) -> FeatureStore:
    """Open a store: a .zarr folder, an .h5 file, or an fsspec URL of a Zarr store.

    Reads only the root attributes, the manifest and the calibration.

    allow_partial: read the published parts of an unfinished store.
    storage_options: passed to fsspec.
    cache: for a finished store behind a URL, `disk:/scratch/cache,100GB` stores what is read in
        this folder, up to this size; processes may share it.

    Raises StoreError if the store is missing, unfinished, of another version, or damaged;
    Unreachable if a network does not answer; UserError if `cache` has another form or its folder
    cannot be written.
    """
    bounds = parse_disk_cache(cache) if cache else None
    disk_cache = DiskCache(*bounds) if bounds and "://" in str(path) else None
    source = open_source(path, storage_options)
    try:
        return with_refetches(source.remote, lambda: _open(source, allow_partial, disk_cache))
    except BaseException:
        source.close()
        raise


def _open(source: StoreSource, allow_partial: bool, cache: DiskCache | None) -> FeatureStore:
    with suggest_repair():
        attributes = source.attributes()
    features = check_root(attributes, source.path)
    if attributes["state"] != "sealed":
        if not allow_partial:
            raise unfinished_error(source)
        manifest = manifest_of(source, attributes, list(published_parts(source, features)))
        with suggest_repair():
            return FeatureStore(source, attributes, features, manifest)
    with suggest_repair():
        hidden = () if cache is not None else features.hidden  # a cache may have the calibration
        # Requested together: with one request after another, opening a store over a network took
        # twice as long.
        source.announce(["manifest", *(p for name in hidden for p in calibration_paths(name))])
        manifest, _ = sealed_manifest(source, attributes, features)
        if cache is not None:
            # Only now is the checksum proved, by which the cache identifies the store.
            source.use_cache(cache, attributes["checksum"])
            record_copy(
                source.address, manifest, "disk cache", cache.folder, attributes["checksum"]
            )
        return FeatureStore(source, attributes, features, manifest)


class FeatureStore(Sequence[Record]):
    """Reads a store, as a sequence of records: one for each sequence of the corpus.

    Reads raise StoreError soon after another process has rewritten the store.
    """

    def __init__(
        self,
        source: StoreSource,
        attributes: Mapping[str, Any],
        features: Features,
        manifest: Manifest,
        *,
        calibrated: bool = True,
    ) -> None:
        """Read the calibration if `calibrated`.

        Without calibration, a store whose calibration is damaged can be opened, but its hidden
        states cannot be decoded.
        """
        self.source, self.path = source, source.path
        self.features, self.manifest = features, manifest
        self.identity: dict[str, Any] = dict(attributes["identity"])
        self.watch = ChangeWatch(source, attributes)
        self._index = PartIndex(source, features, manifest, self.watch)
        self.meta: dict[str, Any] = {"identity": self.identity}
        for key in ("features", "software", "state", "version", "created"):
            self.meta[key] = attributes[key]
        self.meta["parts"] = len(manifest.parts)
        for key in ("sequences", "tokens", "squares", "text_bytes"):
            self.meta[key] = getattr(manifest.totals, key)
        names = features.hidden if calibrated else ()
        source.announce(path for name in names for path in calibration_paths(name))
        self.calibration: Calibration = {name: self.read_calibration(name) for name in names}
        self._streamer = Streamer(self._index, self.calibration, self.watch)

    def __reduce__(self) -> tuple[Any, tuple[str], str | None]:
        """Pickle only the path and options; a spawned worker opens the store again."""
        unfinished, options = self.meta["state"] != "sealed", self.source.options
        cache = self.source.cache.word if self.source.cache else None
        again = partial(open_store, allow_partial=unfinished, storage_options=options, cache=cache)
        return again, (self.source.address,), self.watch.opened

    def __setstate__(self, checksum: str) -> None:
        # Otherwise a worker would read other texts than its parent if the store was rewritten
        # meanwhile.
        self.watch.compare(checksum)

    def read_calibration(self, name: str) -> tuple[Floats, Floats]:
        """Read mean and standard deviation [D] of a hidden state. Raises StoreError if they are
        damaged."""
        arrays = self.manifest.arrays
        pair = tuple(read_outside(self.source, arrays, path) for path in calibration_paths(name))
        return check_calibration(pair, self.features, f"{self.path}: calibration of {name}")

    def outside(self, name: str) -> Array:
        """Read a whole array outside the parts (teacher/..., calibration/...).

        Raises StoreError if it is missing or damaged, or has NaN or infinite values.
        """
        values = read_outside(self.source, self.manifest.arrays, name)
        return check_finite(values, f"{self.path}: {name}")

    @cached_property
    def task(self) -> TaskSpec | None:
        """Return the task that the teacher was fine-tuned for, or None, with its `problem_type`.

        Stores that were written before features had this key have it in the teacher's config.json.
        Raises StoreError if that file is damaged.
        """
        task = self.features.task
        written_before = task and task.kind == "classification" and not task.problem_type
        if not task or not written_before or "config.json" not in self.teacher_files():
            return task
        stored = self.teacher_settings("config.json").get("problem_type")
        return replace(task, problem_type=stored) if stored in PROBLEM_TYPES else task

    def _names(self, group: str) -> tuple[str, ...]:
        begin = f"{group}/"
        return tuple(n.removeprefix(begin) for n in self.manifest.arrays if n.startswith(begin))

    def part(self, index: int) -> PartReader:
        """Open the part at `index` in the manifest; its number may differ from the index."""
        return self._index.part(index)

    def cache_arrays(self, chosen: Callable[[str], bool] | None) -> None:
        """Choose the arrays of parts, by path, to cache in memory after their first use.

        None, the initial state, caches no array.
        """
        self._index.set_cache(chosen)

    def locate(self, index: int) -> tuple[PartReader, int]:
        """Return the part of sequence `index`, and its position in the part."""
        return self._index.locate(index)

    def lengths(self, begin: int, end: int) -> Array:
        """Return int64 [end - begin], the numbers of tokens of sequences begin..end of one part."""
        return self._index.lengths(begin, end)

    def all_lengths(self) -> Array:
        """Return int64 [n], the numbers of tokens of all sequences."""
        return self._index.lengths_of_parts(0, len(self.manifest.parts))

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Record | list[Record]:
        """Return the record of sequence `index`, or a list of records for a slice.

        A negative index counts from the end. Raises IndexError past the end, TypeError for any
        other index.
        """
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        try:
            if isinstance(index, bool):  # for Python True is the number 1
                raise TypeError
            number = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{self.path}: expected an integer or a slice, the number of a sequence, got"
                f" {type(index).__name__}; for a column, or a list of rows, call to_datasets()"
            ) from None
        if not -len(self) <= number < len(self):
            raise IndexError(
                f"{self.path}: no sequence {number}; it has {len(self)}, numbered from 0"
            )
        number %= len(self)
        return Record(number, *self.locate(number), self.calibration)

    def texts(self, blocks: ArrayLike | None = None) -> Iterator[str]:
        """Yield the texts of all sequences in order, or of `blocks`, which are rows of `blocks()`.

        Reads one part at a time.
        """
        edges = self.manifest.first
        parts = np.stack([edges[:-1], edges[1:]], axis=1)
        rows = parts if blocks is None else self._index.check_blocks(blocks)
        for begin, end in rows.tolist():
            part, position = self.locate(begin)
            yield from part.texts(position, position + end - begin)

    def embeddings(self) -> Floats:
        """Return float32 [n, W], the teacher's vectors. Raises StoreError if they are missing or
        damaged."""
        if self.features.embedding is None:
            raise StoreError(f"{self.path}: holds no embedding; dump with --head embedding")
        vectors = [np.empty((0, self.features.embedding.width), np.float32)]
        for reader in map(self.part, range(len(self.manifest.parts))):
            # `check` does not call `PartReader.read`, which would notice a rewritten store.
            with self.watch.reporting_changes():
                for name in self.features.level.embedding.names:
                    reader.check(f"{EMBEDDING}/{name}")
            vectors.append(reader.vectors(0, reader.part.counts.sequences))
        return check_finite(np.concatenate(vectors), f"{self.path}: {EMBEDDING}")

    def single_texts(self, blocks: ArrayLike | None = None) -> Iterator[str]:
        """Yield texts as `texts` does; for a store of pairs, both texts of each pair, one after the
        other.

        Raises StoreError for a text that is not a pair.
        """
        for text in self.texts(blocks):
            yield from split_pair(text, self.features.separator, self.path)

    def blocks(self, block_tokens: int = 4096) -> Array:
        """Return int64 [n, 2], a row (begin, end) for each block: consecutive sequences with about
        `block_tokens` tokens in all."""
        return self._index.blocks(block_tokens)

    def _blocks(self, blocks: ArrayLike | None) -> Array:
        return self.blocks() if blocks is None else self._index.check_blocks(blocks)

    def stream(
        self,
        seed: int = 0,
        epoch: int = 0,
        batch_tokens: int = 16384,
        *,
        blocks: ArrayLike | None = None,
        features: str | Sequence[str] | None = None,
        check: bool = False,
        **more: Unpack[StreamArguments],
    ) -> Iterator[Batch]:
        """Yield every sequence of the blocks once, in batches.

        The order is a pure function of (blocks, seed, epoch). The arrays of a batch are valid until
        the next batch.

        batch_tokens: a batch has B * longest <= batch_tokens. A longer sequence is a batch of its
            own.
        blocks: rows of `blocks()`; None for all.
        features: one or several of hidden, logits, attention, task, embedding; None for all.
        check: check the laws of values (FORMAT.md, section 6), and compare each array with its
            checksum in a thread when its part is first read. Damage raises StoreError, at the end
            of the epoch at the latest. With `every`, one of `every` parts is compared; for a store
            behind a URL none, as its arrays would be fetched twice.
        more: `view` (0); `shuffle` (true); `pool_blocks` (64), the number of blocks that are
            shuffled together; `batch_texts`, the number of sequences in a batch, in place of
            `batch_tokens`; `skip` (0) and `every` (1): skip the first `skip` batches without
            reading them, then yield every `every`-th. Sequences that are skipped are read only if
            they share a compressed chunk with others.
        """
        kinds, rows = self._kinds(features, more.get("view", 0)), self._blocks(blocks)
        order = StreamOrder(seed, epoch, batch_tokens, rows, features=kinds, **more)
        return self._streamer.stream(order, check)

    def _kinds(self, features: str | Sequence[str] | None, view: int) -> tuple[str, ...]:
        """Return the kinds of features to read. Raises StoreError for an unknown kind or view."""
        kinds, views = KINDS if features is None else names_of(features), self.features.views
        if not set(kinds) <= set(KINDS):
            names = ", ".join(KINDS)
            raise StoreError(f"{self.path}: features must be among {names}, got {kinds!r}")
        if not 0 <= view < views:
            raise StoreError(f"{self.path}: no view {view}; it has 0..{views - 1}")
        return kinds

    def gather(
        self,
        batches: Iterable[ArrayLike],
        *,
        view: int = 0,
        features: str | Sequence[str] | None = None,
    ) -> Iterator[Batch]:
        """Yield one batch for each int64 [B] of sequence numbers, in this order.

        `features` is as for `stream`. The arrays of a batch are valid until the next batch. Each
        sequence is read by itself: to read much of a store this way, call `cache_arrays` first.
        Raises StoreError for a number out of range.
        """
        return self._streamer.gather(batches, view, self._kinds(features, view))

    def batch_count(
        self,
        seed: int = 0,
        epoch: int = 0,
        batch_tokens: int = 16384,
        *,
        blocks: ArrayLike | None = None,
        pool_blocks: int = 64,
        batch_texts: int | None = None,
    ) -> int:
        """Return the number of batches that `stream` yields for these arguments. Reads only
        lengths."""
        rows = self._blocks(blocks)
        order = StreamOrder(
            seed, epoch, batch_tokens, rows, pool_blocks=pool_blocks, batch_texts=batch_texts
        )
        return order.batch_count(self._index)

    def table(
        self, columns: str | Sequence[str] | None = None, floats: str = "float32"
    ) -> StoreTable:
        """Return the store as an Arrow table with a row for each sequence.

        `columns` and `floats` as for `to_parquet`. The table has a `schema`, and `batches()` of
        about 16 MB, which are read on iteration.
        """
        # Imported here: reading and training do not wait for pyarrow.
        from teachonce.store.read.arrow import StoreTable

        metadata = {key: self.meta[key] for key in ("features", "identity", "software")}
        metadata["content"] = self.manifest.content()
        names = None if columns is None else names_of(columns)
        return StoreTable(self._index, self._streamer, metadata, names, floats)

    def to_parquet(
        self,
        path: str | Path,
        *,
        columns: str | Sequence[str] | None = None,
        floats: str = "float32",
        file_bytes: int = 2**29,
        on_rows: Callable[[int], object] = lambda rows: None,
    ) -> list[Path]:
        """Write the store as Parquet, a row for each sequence, in order; return the files.

        path: a file if it ends with `.parquet`, else a new folder of several files.
        columns: names of the columns, in order; None for all.
        floats: float32 or float16, the type of states, maps, vectors and inputs of the head.
        file_bytes: approximate size of each file of a folder.
        on_rows: called with the number of rows of each row group, which has about 64 MB. One row
            group at a time is in memory.

        The schema's metadata have the store's features and identity under `teachonce`. Raises
        StoreError for an unknown column, a number that float16 cannot hold, a path that exists, and
        damaged arrays, UserError for a URL; nothing is left at `path` then.
        """
        from teachonce.store.read.table_files import check_free, write_parquet

        table = self.table(columns, floats)
        target = local_path(path)
        check_free(target)  # a copy that is refused must not be recorded
        record_copy(self.source.address, self.manifest, "table", target)
        return write_parquet(table, target, file_bytes, on_rows)

    def to_datasets(
        self,
        *,
        columns: str | Sequence[str] | None = None,
        floats: str = "float32",
        streaming: bool = False,
        cache_dir: str | Path | None = None,
    ) -> Any:
        """Open the store as a `datasets.Dataset`: row i is sequence i.

        `columns` and `floats` as for `to_parquet`. The rows are written once to an Arrow file in
        `cache_dir`, by default a folder in the cache of `datasets`, and memory-mapped. With
        `streaming`, an `IterableDataset` reads the store itself. Raises StoreError as
        `to_parquet` does, and for `cache_dir` with `streaming`; UserError for a `cache_dir` that is
        a URL.
        """
        from teachonce.store.read.table_files import dataset_of, streamed_dataset_of

        if streaming:
            if cache_dir is not None:
                raise StoreError(
                    f"cache_dir {cache_dir}: a streamed dataset writes no file; leave cache_dir or"
                    " streaming out"
                )
            return streamed_dataset_of(partial(self.table, columns, floats))
        folder = local_path(cache_dir) if cache_dir else None
        on_path = partial(record_copy, self.source.address, self.manifest, "datasets")
        return dataset_of(self.table(columns, floats), self.manifest.content(), folder, on_path)

    def teacher_files(self) -> Mapping[str, bytes]:
        """Return the teacher's stored files by name; each is read on access."""
        names = self._names("teacher/files")
        return LazyMap(names, lambda n: self.outside(f"teacher/files/{n}").tobytes(), "file")

    def teacher_file(self, name: str) -> bytes:
        """Read a stored file of the teacher, such as tokenizer.json. Raises StoreError if there is
        none."""
        return self.teacher_files()[name]

    def tokenizer(self) -> Tokenizer:
        """Load the teacher's tokenizer from the store, without padding and truncation. Raises
        StoreError if it is missing or cannot be read."""
        data, written_with = self.teacher_file("tokenizer.json"), self.meta["software"]
        where = f"{self.path}: tokenizer.json in it"
        return parse_tokenizer(data, where, written_with.get("tokenizers"))

    def teacher_settings(self, name: str) -> dict[str, Any]:
        """Read a stored JSON object of the teacher, such as config.json. Raises StoreError if it is
        not a JSON object."""
        return json_object(self.teacher_file(name), f"{self.path}: {name} in it")

    def teacher_weights(self) -> Mapping[str, Array]:
        """Return the teacher's float16 weights by parameter name; each is read on access."""
        names = self._names("teacher/weights")
        return LazyMap(names, lambda name: self.outside(f"teacher/weights/{name}"), "weights")

    def head(self) -> tuple[Floats, Floats]:
        """Read weight [V, D] and bias [V] of the LM head: logits = values @ weight.T + bias.

        `features.logits.capped` caps them as the teacher does (Gemma). Raises StoreError if the
        store has no head.
        """
        if self.features.logits is None or self.features.logits.tier != "head":
            raise MissingFeature("no LM head in this store; dump with --logits head")
        return self.outside("teacher/head/weight"), self.outside("teacher/head/bias")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counts_line(self) -> str:
        """Return the numbers of sequences, tokens and parts, in words."""
        names = {"sequences": "sequence", "tokens": "teacher token", "parts": "part"}
        return ", ".join(counted(self.meta[key], name) for key, name in names.items())

    def __repr__(self) -> str:
        """Return the path, the sizes and the features of the store."""
        size, spec = self.counts_line(), self.features
        logits, task = spec.logits and spec.logits.tier, spec.task and spec.task.kind
        vectors = spec.embedding and "embedding"
        names = (word for word in (*spec.hidden, *spec.attention, logits, task, vectors) if word)
        summary = ", ".join(dict.fromkeys(names)) or "text alone"
        return f"<FeatureStore {self.path}: {size}; {summary}; {counted(spec.views, 'view')}>"

    def _repr_html_(self) -> str:
        """Return a table of the teacher, the sizes and the features, which a notebook shows."""
        spec = self.features
        rows = {
            "teacher": object_in(self.identity, "teacher").get("id", ""),
            "size": self.counts_line(),
            "hidden": ", ".join(spec.hidden),
            "attention": ", ".join(spec.attention),
            "logits": f"{spec.logits.tier}, {spec.logits.size}" if spec.logits else "",
            "task": f"{spec.task.kind}: {', '.join(spec.task.labels)}" if spec.task else "",
            "embedding": "" if spec.embedding is None else f"{spec.embedding.width} numbers",
            "views": spec.views,
            "codec": spec.codec,
        }
        return html_table(self.path, [row for row in rows.items() if row[1] != ""])

    def close(self) -> None:
        """Close open files and free memory; a later read opens them again."""
        self.source.close()
        self._streamer.close()
        self._index.close()
