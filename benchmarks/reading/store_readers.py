"""The readers that are compared: ours, others of the same store, and a memory map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from benchmarks.reading.record_formats import Arrow, HuggingFace, LitData, Mosaic
from benchmarks.reading.workload import BATCH_TOKENS, MAPS, Arrays, Corpus, Epoch
from teachonce.store import FeatureStore, open_store
from teachonce.store.containers.zarr.tree import ZarrSource
from teachonce.store.read.pool import Buffers
from teachonce.store.read.stream import gather_maps
from teachonce.support.arrays import Array, ranges


class Peer(Protocol):
    """Writes and reads features in one format. `write` raises ImportError without its package."""

    @property
    def name(self) -> str:
        """Return the reader's name in the tables."""

    def write(self, corpus: Corpus, path: Path) -> None:
        """Put the corpus under a path."""

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        """Yield the batches of an epoch, each with every array of the store's view 0."""


@dataclass(frozen=True)
class Stream:
    """Reads a store, or half of it, with `stream`, through Teachonce's reader of Zarr or another
    one."""

    name: str
    path: Path
    source: Callable[[str], Any] | None = None
    half: int | None = None

    def write(self, corpus: Corpus, path: Path) -> None:
        pass

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        store = open_store(self.path)
        if self.source:
            source = self.source(str(self.path))
            store = FeatureStore(source, source.attributes(), store.features, store.manifest)
        blocks = store.blocks()
        mine = blocks if self.half is None else blocks[self.half :: 2]

        def epoch(number: int) -> Iterator[Arrays]:
            for batch in store.stream(0, number, BATCH_TOKENS, blocks=mine):
                yield dict(batch.stored)

        return epoch


class PartsBy(ZarrSource):
    """Reads the parts of a store on disk with another reader, and all other arrays with
    Teachonce's."""

    def __init__(self, path: str, read: Callable[[str], Any]) -> None:
        super().__init__(path)
        self.read = read

    def array(self, name: str) -> Any:
        return self.read(name) if name.startswith("parts/") else super().array(name)


class Slices:
    """Reads an array with another library, at most `rows` rows at a time. `decode` makes a NumPy
    array of the library's slice."""

    def __init__(
        self, array: Any, dtype: Any, rows: int, decode: Callable[[Any], Array] = np.asarray
    ) -> None:
        self.array, self.shape, self.dtype = array, array.shape, dtype
        self.rows, self.decode = max(1, rows), decode

    def read(self, begin: int, end: int) -> Array:
        return self.decode(self.array[begin:end])

    def read_into(self, begin: int, end: int, out: Array) -> None:
        for row in range(begin, end, self.rows):
            piece = self.read(row, min(end, row + self.rows))
            out[row - begin : row - begin + len(piece)] = piece

    def prefetch(self, begin: int, end: int) -> None:
        pass


def by_zarr_python(path: str) -> ZarrSource:
    """Read by zarr-python, the rows of a block of 4,096 tokens at a time."""

    def read(name: str) -> Slices:
        part = "/".join(name.split("/")[:2])
        tokens = zarr.open_array(f"{path}/{part}/token/id", mode="r").shape[0]
        array: Any = zarr.open_array(f"{path}/{name}", mode="r")
        return Slices(array, array.dtype, -(-array.shape[0] // max(1, tokens // 4096)))

    return PartsBy(path, read)


def by_tensorstore(path: str) -> ZarrSource:
    """Read by tensorstore, all requested rows of an array at once."""
    import tensorstore

    def read(name: str) -> Slices:
        files = {"driver": "file", "path": f"{path}/{name}"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": files}).result()
        rows = array.shape[0]
        return Slices(array, array.dtype.numpy_dtype, rows, lambda part: part.read().result())

    return PartsBy(path, read)


class Npy:
    """Reads two memory-mapped .npy files, the upper bound for any file format."""

    name = ".npy memory map, fused records"

    def write(self, corpus: Corpus, path: Path) -> None:
        path.mkdir()
        np.save(path / "tokens.npy", corpus.tokens)
        np.save(path / "maps.npy", corpus.maps)

    def open(self, corpus: Corpus, path: Path) -> Epoch:
        tokens, maps = (
            np.asarray(np.load(path / f"{name}.npy", mmap_mode="r")) for name in ("tokens", "maps")
        )

        def epoch(number: int) -> Iterator[Arrays]:
            buffers = Buffers()
            for indices in corpus.batches(number):
                lengths = corpus.lengths[indices]
                rows = ranges(corpus.token_start[indices], lengths)
                flat = buffers.get("tokens", (len(rows),), corpus.record)
                np.take(tokens, rows, out=flat, mode="clip")
                squares = buffers.get("maps", (int((lengths**2).sum()),), maps.dtype)
                gather_maps(maps, corpus.square_start[indices], lengths, squares)
                yield {name: flat[name] for name in corpus.names} | {MAPS: squares}

        return epoch


def peers(zarr: Path, h5: Path) -> list[Peer]:
    """Return every reader, Teachonce's first."""
    return [
        Stream("ours, Zarr", zarr),
        Stream("ours, HDF5", h5),
        Stream("zarr-python", zarr, by_zarr_python),
        Stream("tensorstore", zarr, by_tensorstore),
        Npy(),
        Arrow(),
        *(kind(fused) for kind in (HuggingFace, LitData, Mosaic) for fused in (False, True)),
    ]
