"""Formats that store a sequence as a record, and their own readers.

Nothing is compressed in them. Most are measured twice: as one would use them, with a column for
each feature, and with all features of a token fused into one structured element, which suits them
best.

Install them in an environment of their own, as torchvision may disagree with a CPU build of torch:
`pip install -c constraints.txt -e '.[bench]'`. MosaicML requires older versions of what the project
needs, and works without them:
`pip install --no-deps mosaicml-streaming==0.13.0 brotli zstd python-snappy cramjam catalogue`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from benchmarks.reading.workload import MAPS, Arrays, Corpus, Epoch
from teachonce.support.arrays import Array


class Arrow:
    """Reads a memory-mapped table (a row per sequence, a list column per feature) with `take`."""

    name = "pyarrow, Table.take"

    def table(self, corpus: Corpus) -> Any:
        import pyarrow as pa

        columns = {}
        for name in [*corpus.names, MAPS]:
            flat = corpus.maps if name == MAPS else corpus.tokens[name]
            edges = corpus.square_start if name == MAPS else corpus.token_start
            items = np.ascontiguousarray(flat).reshape(-1)
            items = items.view(np.uint8) if items.dtype == bool else items
            lists = pa.array(edges * (len(items) // len(flat)))
            columns[name] = pa.LargeListArray.from_arrays(lists, pa.array(items))
        return pa.table(columns)

    def write(self, corpus: Corpus, path: Path) -> None:
        import pyarrow as pa

        table = self.table(corpus)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        import pyarrow as pa

        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()

        def epoch(number: int) -> Iterator[Arrays]:
            for indices in corpus.batches(number):
                batch = table.take(pa.array(indices))
                columns = zip(batch.column_names, batch.columns, strict=True)
                yield {n: c.chunk(0).flatten().to_numpy(zero_copy_only=False) for n, c in columns}

        return epoch


def _items(corpus: Corpus, fused: bool) -> Iterator[dict[str, Array]]:
    """Yield each sequence as an array for each feature, or as the bytes of its records and map."""
    for tokens, maps in corpus.sequences():
        if fused:
            yield {"tokens": tokens.view(np.uint8), MAPS: maps}
        else:
            plain = {name: np.ascontiguousarray(tokens[name]) for name in corpus.names}
            yield {n: a.view(np.uint8) if a.dtype == bool else a for n, a in plain.items()} | {
                MAPS: maps
            }


def _joined(corpus: Corpus, columns: Mapping[str, Sequence[Any]]) -> Arrays:
    """Return the flat batch of such sequences."""

    def flat(name: str, dtype: Any) -> Array:
        items = columns[name]
        if isinstance(items[0], bytes):
            items = [np.frombuffer(item, dtype) for item in items]
        joined = np.concatenate(items)
        return joined if joined.dtype.itemsize == 1 else joined.astype(dtype, copy=False)

    maps = {MAPS: flat(MAPS, np.uint8)}
    if "tokens" in columns:
        tokens = flat("tokens", np.uint8).view(corpus.record)
        return {name: tokens[name] for name in corpus.names} | maps
    return {name: flat(name, corpus.record[name].base) for name in corpus.names} | maps


def _grouped(corpus: Corpus, dataset: Iterable[Any]) -> Iterator[Arrays]:
    """Collect sequences that arrive singly into batches."""
    remaining = iter(dataset)
    while items := list(islice(remaining, corpus.batch_sequences)):
        yield _joined(corpus, {name: [item[name] for item in items] for name in items[0]})


@dataclass(frozen=True)
class Records:
    """Reads a format with a record for each sequence: two blobs, or an array for each feature."""

    fused: bool
    package: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.package}, {'fused bytes' if self.fused else 'one column per feature'}"


class HuggingFace(Records):
    """Reads the rows of a batch by number, in numpy format."""

    package = "datasets"

    def write(self, corpus: Corpus, path: Path) -> None:
        import datasets
        import pyarrow as pa

        table = Arrow().table(corpus)
        if self.fused:
            items = list(_items(corpus, True))
            table = pa.table({n: pa.array([item[n].tobytes() for item in items]) for n in items[0]})
        datasets.Dataset(table).save_to_disk(str(path))

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        import datasets

        table = datasets.load_from_disk(str(path)).with_format("numpy")

        def epoch(number: int) -> Iterator[Arrays]:
            for indices in corpus.batches(number):
                columns = {name: list(items) for name, items in table[indices].items()}
                yield _joined(corpus, columns)

        return epoch


class LitData(Records):
    """Reads litdata's StreamingDataset, shuffled by itself."""

    package = "litdata"

    def write(self, corpus: Corpus, path: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(path), chunk_bytes="64MB")
        for number, item in enumerate(_items(corpus, self.fused)):
            writer[number] = item
        writer.done()
        writer.merge()

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        from litdata import StreamingDataset

        dataset = StreamingDataset(str(path), shuffle=True)
        return lambda epoch: _grouped(corpus, dataset)

    def load(self) -> None:
        """Import the modules that `open_far` uses."""
        from litdata.streaming import downloader  # noqa: F401

    def open_far(self, corpus: Corpus, url: str, local: Path) -> Epoch:
        """Open as `open` does, from an address, through a folder."""
        from litdata import StreamingDataset
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litdata has no option for it
        server = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        dataset = StreamingDataset(url, str(local), shuffle=True, storage_options=server)
        return lambda epoch: _grouped(corpus, dataset)


class Mosaic(Records):
    """Reads MosaicML's StreamingDataset over MDS files, shuffled by itself."""

    package = "MosaicML"

    def _streaming(self) -> Any:
        # Its picture part needs torchvision, which is not built for every torch; it is not used
        # here.
        sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
        import streaming

        return streaming

    def write(self, corpus: Corpus, path: Path) -> None:
        kinds = {
            n: "bytes" if self.fused else f"ndarray:{a.dtype}"
            for n, a in next(_items(corpus, self.fused)).items()
        }
        with self._streaming().MDSWriter(out=str(path), columns=kinds) as writer:
            for item in _items(corpus, self.fused):
                writer.write({n: a.tobytes() for n, a in item.items()} if self.fused else item)

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        return self._epochs(corpus, local=str(path))

    def load(self) -> None:
        """Import the modules that `open_far` uses."""
        self._streaming()

    def open_far(self, corpus: Corpus, url: str, local: Path) -> Epoch:
        """Open as `open` does, from an address, through a folder."""
        return self._epochs(corpus, remote=url, local=str(local))

    def _epochs(self, corpus: Corpus, **location: str) -> Epoch:
        dataset = self._streaming().StreamingDataset(
            **location, shuffle=True, batch_size=corpus.batch_sequences
        )
        return lambda epoch: _grouped(corpus, dataset)
