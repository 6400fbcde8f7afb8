"""Take parts of one store over into another that is being written, of the same features and
calibration."""

from __future__ import annotations

from teachonce.store.read.store import FeatureStore
from teachonce.store.tools.selection import selected
from teachonce.store.write.writer import StoreWriter
from teachonce.support.arrays import Array


def take_part(
    writer: StoreWriter, number: int, store: FeatureStore, place: int, keep: Array | None
) -> None:
    """Publish the part at `place` of `store` as part `number`, unless that is published: all of it
    where `keep` is None, else the sequences for which it is true.

    A whole part of a Zarr folder shares its files with the source where both lie on one disk; its
    values are then not read. Raises StoreError for an array that does not match its checksum.
    """
    if number in writer.published:
        return
    if keep is None and writer.adopts(store):
        writer.adopt_part(number, store, place)
        return
    part = store.part(place)
    counts, arrays = part.part.counts, {name: part.all(name) for name in part.names()}
    if keep is not None:
        counts, arrays = selected(arrays, store.features, keep)
    writer.write_part(number, counts, arrays)
