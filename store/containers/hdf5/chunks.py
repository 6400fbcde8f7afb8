"""Stored chunks of HDF5 datasets, decoded without HDF5: it decodes one at a time in a process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import h5py
import numpy as np
from numpy.typing import NDArray

from store.containers.blosc import Bytes, Damage, decode

BLOSC, FLETCHER = 32001, h5py.h5z.FILTER_FLETCHER32
CHECKSUM_BYTES = 4
BLOCK = 2**18  # words whose weighted sum, below 2^52, is exact in float64


def filters_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Numbers of the filters that its chunks go through, in order."""
    settings = dataset.id.get_create_plist()
    return tuple(settings.get_filter(place)[0] for place in range(settings.get_nfilters()))


@dataclass(frozen=True)
class Chunks:
    """Chunks of whole rows, and the filters that they went through."""

    rows: int
    size: int  # bytes of a decoded chunk
    filters: tuple[int, ...]

    @staticmethod
    def of(dataset: h5py.Dataset) -> Chunks | None:
        """None where chunks are not of whole rows or not filtered as we filter."""
        chunks, filters = dataset.chunks, filters_of(dataset)
        if not chunks or chunks[1:] != dataset.shape[1:]:
            return None
        if filters not in ((), (FLETCHER,), (BLOSC,), (BLOSC, FLETCHER)):
            return None
        return Chunks(chunks[0], prod(chunks) * dataset.dtype.itemsize, filters)

    def decode(self, skipped: int, stored: Bytes, out: Bytes) -> None:
        """The first bytes of a chunk, as many as `out` takes; bit i of `skipped` is set if filter i
        was not applied. Raises Damage."""
        applied = [name for place, name in enumerate(self.filters) if not skipped >> place & 1]
        if FLETCHER in applied:
            stored, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:].tobytes()
            if fletcher32(stored) != int.from_bytes(checksum, "little"):
                raise Damage("the chunk does not match its checksum")
        if BLOSC in applied:
            decode(stored, "the chunk", self.size, 0, len(out), out)
        elif len(stored) == self.size:
            out[:] = stored[: len(out)]
        else:
            raise Damage(f"the chunk has {len(stored)} bytes, expected {self.size}")


def fletcher32(data: Bytes) -> int:
    """The checksum of HDF5's filter: two sums of big-endian 16-bit words, modulo 65535; only those
    of zeros are 0."""
    words = (np.append(data, np.uint8(0)) if len(data) % 2 else data).view("<u2")
    total, weighted, left = 0, 0, len(words)
    for begin in range(0, len(words), BLOCK):
        block = words[begin : begin + BLOCK].astype(np.float64)
        left, here = left - len(block), int(block.sum())
        total += here
        weighted += int(np.einsum("i,i->", block, _descending(len(block)))) + left * here
    return _folded(weighted) << 16 | _folded(total)


@lru_cache(8)
def _descending(length: int) -> NDArray[np.float64]:
    return np.arange(length, 0, -1, dtype=np.float64)


def _folded(number: int) -> int:
    """Modulo 65535, with 65535 for 0 unless all is 0. Times 256 swaps the bytes of words."""
    return (number * 256 - 1) % 65535 + 1 if number else 0
