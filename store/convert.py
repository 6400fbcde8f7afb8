"""Copy a store: from one file format to another, to a smaller codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from store.features import Features
from store.reader import FeatureStore, open_store
from store.recode import check_codec, recode_part
from store.tree import Array
from store.writer import StoreWriter

Progress = Callable[[list[Any]], Any]


def begin_copy(
    path: str | Path, store: FeatureStore, features: Features, identity: dict[str, Any]
) -> StoreWriter:
    """Begin (or go on with) a store that holds all of `store` outside its parts."""
    weights = store.teacher_weights()

    def pairs() -> Iterator[tuple[str, Array]]:
        for name in weights:
            yield name, weights[name]

    head = features.logits is not None and features.logits.tier == "head"
    return StoreWriter.create_or_resume(
        path,
        identity=identity,
        features=features,
        calibration=store.calibration,
        files=dict(store.teacher_files()),
        weights=pairs(),
        head=store.head() if head else None,
        software=store.meta["software"],
    )


def copy_part(
    writer: StoreWriter, number: int, store: FeatureStore, place: int, target: FeatureStore,
    documents: int,
) -> None:  # fmt: skip
    """Publish the part at `place` of `store` as part `number`, in the codec of `writer` and with
    the calibration of `target`; its document numbers are raised by `documents`."""
    part = store.part(place)
    arrays = {name: part.all(name) for name in part.names()}
    arrays["sequence/document"] = arrays["sequence/document"] + documents
    recoded = recode_part(
        arrays, store.features, writer.features, store.calibration, target.calibration
    )
    writer.write_part(number, part.part.counts, recoded)


def convert(
    source: str | Path,
    target: str | Path,
    codec: str | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Progress = iter,
) -> None:
    """Copy a sealed store to `target` (.zarr or .h5), perhaps in a codec with more error.

    Part by part, so that memory is bounded by one part; stopped, it goes on when started again.
    Raises UserError if the codec would claim less error than the store has.
    """
    store = open_store(source, storage_options=storage_options)
    new = codec or store.features.codec
    check_codec(store.features.codec, new)
    features = dataclasses.replace(store.features, codec=new)
    with closing(begin_copy(target, store, features, store.identity)) as writer:
        for place, part in progress(list(enumerate(store.manifest.parts))):
            if part.number not in writer.published:
                copy_part(writer, part.number, store, place, store, 0)
        writer.seal()
    store.close()
