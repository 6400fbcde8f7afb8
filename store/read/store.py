"""Open a store for reading: `open_store` and the FeatureStore that it returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.containers.cache_option import parse_disk_cache
from teachonce.store.containers.disk_cache import DiskCache
from teachonce.store.containers.interface import StoreSource
from teachonce.store.containers.network import with_refetches
from teachonce.store.containers.paths import open_source
from teachonce.store.errors import StoreError
from teachonce.store.format.features import Calibration, Features, TaskSpec
from teachonce.store.format.layout import EMBEDDING
from teachonce.store.format.manifest import Manifest, check_root, opening
from teachonce.store.format.pairs import split_pair
from teachonce.store.read.cached_arrays import CachePolicy
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.store.read.derived_copies import record_copy
from teachonce.store.read.manifests import (
    calibration_paths,
    check_calibration,
    checked_array,
    finite,
    sealed_manifest,
    unfinished,
    unsealed_manifest,
)
from teachonce.store.read.part import PartReader
from teachonce.store.read.part_index import PartIndex
from teachonce.store.read.record import LazyMap, Record
from teachonce.store.read.stored_task import stored_task
from teachonce.store.read.stored_tokenizer import json_object, load_tokenizer
from teachonce.store.read.stream import Batch, Streamer
from teachonce.store.read.stream_order import KINDS, StreamArguments, StreamOrder
from teachonce.support.arrays import Array, Floats
from teachonce.support.console import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from teachonce.store.read.arrow import Table


def open_store(
    path: str | Path,
    *,
    allow_partial: bool = False,
    storage_options: dict[str, Any] | None = None,
    cache: str | None = None,
) -> FeatureStore:
    """Open a store: a .zarr folder, an .h5 file, or an fsspec URL of a Zarr store.

    Reads the root attributes, the manifest and the calibration only. `allow_partial` gives the
    published parts of an unfinished store. `cache`, such as `disk:/scratch/cache,100GB`, stores
    what is read of a finished store behind a URL in a folder of a local disk, of which it takes at
    most so many bytes; processes may share it. Raises StoreError if the store is missing,
    unfinished, of another version, or damaged; Unreachable if a network gives no answer; UserError
    for a cache that is no such word or cannot be written.
    """
    kept = DiskCache(*parse_disk_cache(cache)) if cache and "://" in str(path) else None
    source = open_source(path, storage_options)
    try:
        return with_refetches(source.remote, lambda: _open(source, allow_partial, kept))
    except BaseException:
        source.close()
        raise


def _open(source: StoreSource, allow_partial: bool, cache: DiskCache | None) -> FeatureStore:
    with opening():
        attributes = source.attributes()
    features = check_root(attributes, source.path)
    if attributes["state"] != "sealed":
        if not allow_partial:
            raise unfinished(source)
        manifest = unsealed_manifest(source, attributes, features)
        with opening():
            return FeatureStore(source, attributes, features, manifest)
    with opening():
        hidden = () if cache is not None else features.hidden  # a cache may have the calibration
        source.announce(["manifest", *(p for name in hidden for p in calibration_paths(name))])
        manifest, _ = sealed_manifest(source, attributes, features)
        if cache is not None:
            source.use_cache(cache, attributes["checksum"])
            record_copy(source.path, manifest, "disk cache", cache.folder, attributes["checksum"])
        return FeatureStore(source, attributes, features, manifest)


class FeatureStore(Sequence[Record]):
    """A store that is open for reading: a sequence of records. `len` is their number."""

    def __init__(
        self,
        source: StoreSource,
        attributes: Mapping[str, Any],
        features: Features,
        manifest: Manifest,
        *,
        calibrated: bool = True,
    ) -> None:
        """Read the calibration if `calibrated`; a store with a damaged one can be read without, but
        no hidden state can be decoded."""
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
        """Pickle the path and the options only; a spawned worker opens the store again."""
        unfinished, options = self.meta["state"] != "sealed", self.source.options
        cache = self.source.cache.word if self.source.cache else None
        again = partial(open_store, allow_partial=unfinished, storage_options=options, cache=cache)
        return again, (self.path,), self.watch.opened

    def __setstate__(self, checksum: str) -> None:
        self.watch.compare(checksum)

    def read_calibration(self, name: str) -> tuple[Floats, Floats]:
        """Mean and deviation [D] of a hidden state. Raises StoreError if they are damaged."""
        pair = tuple(map(self._outside, calibration_paths(name)))
        return check_calibration(pair, self.features, f"{self.path}: calibration of {name}")

    def outside(self, name: str) -> Array:
        """Read a whole array outside the parts (teacher/..., calibration/...). Raises StoreError if
        there is none, if it is damaged, or if it holds NaN or infinity."""
        return finite(self._outside(name), f"{self.path}: {name}")

    def _outside(self, name: str) -> Array:
        entry = self.manifest.arrays.get(name)
        if entry is None:
            raise StoreError(f"{self.path}: has no {name}")
        return checked_array(self.source, name, entry)

    @cached_property
    def task(self) -> TaskSpec | None:
        """What the teacher was fine-tuned for; see `stored_task`."""
        return stored_task(self.features.task, self.teacher_files(), self.path)

    def _names(self, group: str) -> tuple[str, ...]:
        begin = f"{group}/"
        return tuple(n.removeprefix(begin) for n in self.manifest.arrays if n.startswith(begin))

    def part(self, place: int) -> PartReader:
        """The part at a place (not its number), opened; a few are kept open."""
        return self._index.part(place)

    def cache_arrays(self, chosen: Callable[[str], bool] | None) -> None:
        """Choose the arrays of parts, by path, that stay in memory after their first use; None: no
        array, as when the store is opened."""
        self._index.set_cache(CachePolicy(chosen) if chosen else None)

    def locate(self, index: int) -> tuple[PartReader, int]:
        """The part of a sequence, and its position there."""
        return self._index.locate(index)

    def lengths(self, begin: int, end: int) -> Array:
        """int64 [end - begin]: tokens of sequences begin..end of one part."""
        return self._index.lengths(begin, end)

    def all_lengths(self) -> Array:
        """int64 [n]: tokens of all sequences."""
        return self._index.all_lengths()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: Any) -> Any:
        """Record of sequence `index` (negative counts from the end), or a list of records for a
        slice. Raises IndexError past the end, TypeError for any other index."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path}: no sequence {number}; it has {len(self)}")
        number %= len(self)
        return Record(number, *self.locate(number), self.calibration)

    def texts(self, blocks: ArrayLike | None = None) -> Iterator[str]:
        """Texts of all sequences in order, read part by part; or of `blocks`, rows of
        `blocks()`."""
        edges = self.manifest.first
        parts = np.stack([edges[:-1], edges[1:]], axis=1)
        rows = parts if blocks is None else self._index.check_blocks(blocks)
        for begin, end in rows.tolist():
            part, position = self.locate(begin)
            yield from part.texts(position, position + end - begin)

    def embeddings(self) -> Floats:
        """float32 [n, W]: the teacher's vectors. StoreError if there are none, or damaged ones."""
        if self.features.embedding is None:
            raise StoreError(f"{self.path}: holds no embedding; dump with --head embedding")
        found = []
        for reader in map(self.part, range(len(self.manifest.parts))):
            with self.watch.reporting_changes():
                for name in self.features.level.embedding.names:
                    reader.check(f"{EMBEDDING}/{name}")
            found.append(reader.vectors(0, reader.part.counts.sequences))
        return finite(np.concatenate(found), f"{self.path}: {EMBEDDING}")

    def single_texts(self, blocks: ArrayLike | None = None) -> Iterator[str]:
        """Texts as of `texts`, of pairs the first, then the second. StoreError for no pair."""
        for text in self.texts(blocks):
            yield from split_pair(text, self.features.separator, self.path)

    def blocks(self, block_tokens: int = 4096) -> Array:
        """int64 [n, 2]: runs begin..end of sequences of a part, of about `block_tokens` tokens."""
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
        features: Sequence[str] | None = None,
        check: bool = False,
        **more: Unpack[StreamArguments],
    ) -> Iterator[Batch]:
        """Yield every sequence of the blocks once, in batches with B * longest <= batch_tokens, or
        of `batch_texts` sequences.

        The order is a pure function of (blocks, seed, epoch). `blocks` are rows of `blocks()`;
        `features` a subset of hidden, logits, attention, task, embedding. `more` are `view`, 0;
        `shuffle`, true; `pool_blocks`, 64, the blocks that are mixed at once; `batch_texts`; `skip`
        and `every`: skip the first `skip` batches without reading them, then yield every
        `every`-th; rows between are read only if they share a compressed chunk. A sequence longer
        than batch_tokens is a batch alone. Arrays of a batch are valid until the next one. `check`
        checks that the values of a batch are those of a teacher (FORMAT.md, Laws of values), and
        compares each array with the manifest in a thread, whole, when its part is first read: what
        is damaged raises StoreError, at the end of the epoch at the latest. Of one of `every`, one
        of `every` parts is compared; of a store behind a URL none, as it would be fetched twice.
        """
        kinds, views = KINDS if features is None else tuple(features), self.features.views
        rows = self._blocks(blocks)
        order = StreamOrder(seed, epoch, batch_tokens, rows, features=kinds, **more)
        if not 0 <= order.view < views:
            raise StoreError(f"{self.path}: no view {order.view}; it has 0..{views - 1}")
        return self._streamer.stream(order, check)

    def gather(
        self,
        batches: Iterable[ArrayLike],
        *,
        view: int = 0,
        features: Sequence[str] | None = None,
    ) -> Iterator[Batch]:
        """Batches of the sequences whose numbers are given, int64 [B] each, in that order.

        `features`, and how long arrays are valid, as for `stream`. Each sequence is read by itself:
        keep the arrays in memory (`keep`) where all of a store is read so. Raises StoreError for a
        number that the store does not have.
        """
        kinds = KINDS if features is None else tuple(features)
        return self._streamer.gather(batches, view, kinds)

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
        """How many batches `stream` gives for these arguments; reads lengths only."""
        rows = self._blocks(blocks)
        order = StreamOrder(
            seed, epoch, batch_tokens, rows, pool_blocks=pool_blocks, batch_texts=batch_texts
        )
        return order.batch_count(self._index)

    def table(self, columns: Sequence[str] | None = None, floats: str = "float32") -> Table:
        """The store as a table of Arrow: a row for each sequence, made when it is asked for.

        `columns` and `floats` as for `to_parquet`. It has a `schema`, and `batches` of some 16 MB.
        """
        from teachonce.store.read.arrow import Table

        about = {key: self.meta[key] for key in ("features", "identity", "software")}
        about["content"] = self.manifest.content()
        return Table(self._index, self._streamer, about, columns, floats)

    def to_parquet(
        self,
        path: str | Path,
        *,
        columns: Sequence[str] | None = None,
        floats: str = "float32",
        file_bytes: int = 2**29,
        told: Callable[[int], object] = lambda rows: None,
    ) -> list[Path]:
        """Write the store as Parquet: a row for each sequence, in their order; return the files.

        `path` is one file if it ends with `.parquet`, else a new folder of files of about
        `file_bytes` each. `columns` are the names of the wanted columns, in order; None: all.
        States, maps, vectors and inputs of the head are decoded to `floats`, float32 or float16.
        Row groups have some 64 MB, of which one at a time is in memory; `told` receives the number
        of rows of each. The metadata of the schema have the store's features and identity under
        `teachonce`. Raises StoreError for an unknown column, a number that float16 cannot hold, a
        path that exists, and damaged arrays; nothing is then left.
        """
        from teachonce.store.read.table_files import write_parquet

        table = self.table(columns, floats)
        record_copy(self.path, self.manifest, "table", path)
        return write_parquet(table, Path(path), file_bytes, told)

    def to_datasets(
        self,
        *,
        columns: Sequence[str] | None = None,
        floats: str = "float32",
        streaming: bool = False,
        cache_dir: str | Path | None = None,
    ) -> Any:
        """Open the store as a `datasets.Dataset`: row i is sequence i.

        `columns` and `floats` as for `to_parquet`. The rows are written once to an Arrow file in
        `cache_dir`, by default a folder of the cache of `datasets`, and mapped into memory. With
        `streaming` an `IterableDataset` reads the store itself. StoreError as of `to_parquet`.
        """
        from teachonce.store.read.table_files import dataset_of, streamed_dataset_of

        if streaming:
            return streamed_dataset_of(partial(self.table, columns, floats))
        noted = partial(record_copy, self.path, self.manifest, "datasets")
        return dataset_of(self.table(columns, floats), self.manifest.content(), cache_dir, noted)

    def teacher_files(self) -> Mapping[str, bytes]:
        """The teacher's stored files by name, read when asked for."""
        names = self._names("teacher/files")
        return LazyMap(names, lambda n: self.outside(f"teacher/files/{n}").tobytes(), "file")

    def teacher_file(self, name: str) -> bytes:
        """A stored file of the teacher, such as tokenizer.json. StoreError if there is none."""
        return self.teacher_files()[name]

    def tokenizer(self) -> Tokenizer:
        """The teacher's tokenizer, from the store, without padding and truncation."""
        data, written_with = self.teacher_file("tokenizer.json"), self.meta["software"]
        where = f"{self.path}: tokenizer.json in it"
        return load_tokenizer(data, where, written_with.get("tokenizers"))

    def teacher_settings(self, name: str) -> dict[str, Any]:
        """A stored JSON object of the teacher, as config.json. StoreError if it is none."""
        return json_object(self.teacher_file(name), f"{self.path}: {name} in it")

    def teacher_weights(self) -> Mapping[str, Array]:
        """float16 arrays of the teacher by parameter name, read when asked for."""
        names = self._names("teacher/weights")
        return LazyMap(names, lambda name: self.outside(f"teacher/weights/{name}"), "weights")

    def head(self) -> tuple[Floats, Floats]:
        """(weight [V, D], bias [V]) of the frozen LM head: logits = values @ weight.T + bias."""
        return self.outside("teacher/head/weight"), self.outside("teacher/head/bias")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Tell the path, what is held, and of which features."""
        counts, held = ("sequences", "tokens", "parts"), self.features
        size = ", ".join(counted(self.meta[each], each[:-1]) for each in counts)
        logits, task = held.logits and held.logits.tier, held.task and held.task.kind
        words = (word for word in (*held.hidden, *held.attention, logits, task) if word)
        features = ", ".join(dict.fromkeys(words)) or "text alone"
        return f"<FeatureStore {self.path}: {size}; {features}; {counted(held.views, 'view')}>"

    def close(self) -> None:
        """Close open files and let go of memory; reading opens them again."""
        self.source.close()
        self._streamer.close()
        self._index.close()
