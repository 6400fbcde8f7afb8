"""Read rows of an HDF5 dataset: its chunks are decoded here, from a map of the file, by any number
of threads."""

from __future__ import annotations

from math import prod

import numpy as np

from teachonce.store.containers.blosc import Bytes, Damage
from teachonce.store.containers.hdf5.blocks import UNDEFINED, Blocks
from teachonce.store.containers.hdf5.chunks import Dataset
from teachonce.store.containers.interface import RowSlices
from teachonce.support.arrays import Array


class Hdf5Slices(RowSlices):
    """Slices of rows of an HDF5 dataset."""

    def __init__(self, blocks: Blocks, dataset: Dataset, where: str) -> None:
        super().__init__(dataset.shape, dataset.dtype, where)
        self._blocks, self.dataset = blocks, dataset
        self._sound: set[int] = set()  # chunks whose checksum was compared
        self._begun: set[int] = set()  # rows of chunks that the disk was asked for

    def decode(self, begin: int, end: int, out: Array) -> None:
        rows = self.dataset.chunk[0]
        for number in range(begin // rows, -(-end // rows)):
            low, high = max(begin, number * rows), min(end, (number + 1) * rows)
            self._read(number, low - number * rows, out[low - begin : high - begin])

    def _read(self, number: int, low: int, out: Array) -> None:
        """Fill `out` from its row `low` on with the chunks that hold the same rows."""
        dataset = self.dataset
        row = prod(dataset.chunk[1:]) * dataset.dtype.itemsize
        columns = dataset.grid[1:]
        edges = low * row, (low + len(out)) * row
        for place, corner in enumerate(np.ndindex(*columns), number * prod(columns)):
            skipped, stored = self._stored(place)
            if dataset.chunk[1:] == self.shape[1:] and out.flags.c_contiguous:
                dataset.decode(skipped, stored, *edges, out.reshape(-1).view(np.uint8))
                continue
            box = np.empty((len(out), *dataset.chunk[1:]), self.dtype)
            dataset.decode(skipped, stored, *edges, box.reshape(-1).view(np.uint8))
            sizes = zip(corner, dataset.chunk[1:], strict=True)
            part = out[(slice(None), *(slice(at * n, at * n + n) for at, n in sizes))]
            part[...] = box[tuple(map(slice, part.shape))]

    def _stored(self, place: int) -> tuple[int, Bytes]:
        """The filters that a chunk skipped, and its bytes; their checksum is compared when they
        are first used."""
        if self.dataset.inline is not None:
            return 0, np.frombuffer(self.dataset.inline, np.uint8)
        places = self.dataset.places
        address, size, skipped = places[place].tolist() if place < len(places) else (UNDEFINED,) * 3
        if address == UNDEFINED:
            raise Damage(f"chunk {place} is missing")
        stored = self._blocks.raw(address, size, f"chunk {place}")
        if place not in self._sound:
            self.dataset.check_sum(skipped, stored)
            self._sound.add(place)
        return skipped, stored

    def prefetch(self, begin: int, end: int) -> None:
        """Let the disk begin to read the chunks of some rows; a dataset is written at once, so
        that its chunks follow one another."""
        rows, columns = self.dataset.chunk[0], prod(self.dataset.grid[1:])
        first, last = begin // rows, -(-end // rows)
        if self._begun.issuperset(range(first, last)):
            return
        self._begun.update(range(first, last))
        places = self.dataset.places[first * columns : last * columns]
        places = places[places[:, 0] != UNDEFINED]
        if len(places):
            low, high = int(places[:, 0].min()), int((places[:, 0] + places[:, 1]).max())
            self._blocks.map.prefetch(low, high - low)
