"""Chunks of HDF5 datasets, decoded by many threads: HDF5 itself decodes one chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import h5py
import numpy as np
from numcodecs import Fletcher32

from store.containers.blosc import Bytes, Damage, decode

BLOSC, FLETCHER = 32001, h5py.h5z.FILTER_FLETCHER32


def filters_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """The numbers of the filters of a dataset, in the order in which chunks go through them."""
    settings = dataset.id.get_create_plist()
    return tuple(settings.get_filter(place)[0] for place in range(settings.get_nfilters()))


@dataclass(frozen=True)
class Chunks:
    """How the chunks of a dataset are stored."""

    rows: int
    size: int  # bytes of a decoded chunk
    filters: tuple[int, ...]

    @staticmethod
    def of(dataset: h5py.Dataset) -> Chunks | None:
        """Describe the chunks of a dataset; None if they are not whole rows, or not filtered as
        ours."""
        chunks, filters = dataset.chunks, filters_of(dataset)
        if not chunks or chunks[1:] != dataset.shape[1:]:
            return None
        if filters not in ((), (FLETCHER,), (BLOSC,), (BLOSC, FLETCHER)):
            return None
        return Chunks(chunks[0], prod(chunks) * dataset.dtype.itemsize, filters)

    def decode(self, skipped: int, stored: Bytes, out: Bytes) -> None:
        """Decode the first bytes of a chunk, as many as `out` takes. Raises Damage.

        Bit i of `skipped` is set if filter i was not applied to this chunk.
        """
        applied = [name for place, name in enumerate(self.filters) if not skipped >> place & 1]
        if FLETCHER in applied:
            stored = _checked(stored)
        if BLOSC in applied:
            decode(stored, "the chunk", self.size, 0, len(out), out)
        elif len(stored) == self.size:
            out[:] = stored[: len(out)]
        else:
            raise Damage(f"the chunk has {len(stored)} bytes, expected {self.size}")


def _checked(stored: Bytes) -> Bytes:
    """Compare the Fletcher-32 checksum at the end; returns the bytes before it. Raises Damage."""
    try:
        return np.frombuffer(Fletcher32().decode(stored), np.uint8)
    except (RuntimeError, IndexError) as error:  # another checksum; too few bytes for one
        raise Damage("the chunk does not match its checksum") from error
