"""Copy stores: from one file format to another, to a smaller codec, several into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from store.errors import UserError
from store.features import Features
from store.reader import FeatureStore, open_store
from store.recode import check_codec, recode_part
from store.tree import Array
from store.writer import StoreWriter

Progress = Callable[[list[Any]], Any]


def _begin(
    path: str | Path, store: FeatureStore, features: Features, identity: dict[str, Any]
) -> StoreWriter:
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


def _copy_part(
    writer: StoreWriter, number: int, store: FeatureStore, place: int, target: FeatureStore,
    documents: int,
) -> None:  # fmt: skip
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
    writer = _begin(target, store, features, store.identity)
    for place, part in progress(list(enumerate(store.manifest.parts))):
        if part.number not in writer.published:
            _copy_part(writer, part.number, store, place, store, 0)
    writer.seal()
    store.close()


def _same_teacher(stores: Sequence[FeatureStore], recode: bool) -> None:
    first = stores[0]
    for other in stores[1:]:
        for key in sorted((set(first.identity) | set(other.identity)) - {"corpus"}):
            if first.identity.get(key) != other.identity.get(key):
                raise UserError(
                    f"{other.path}: {key} is not that of {first.path} "
                    f"({str(other.identity.get(key))[:80]} and "
                    f"{str(first.identity.get(key))[:80]}); only dumps of one teacher with the "
                    "same settings can be merged"
                )
        if other.features != first.features:
            raise UserError(
                f"{other.path}: features are not those of {first.path} ({other.features} and "
                f"{first.features}); dump or convert with the same options"
            )
        equal = all(
            np.array_equal(a, b)
            for name in first.features.hidden
            for a, b in zip(first.calibration[name], other.calibration[name], strict=True)
        )
        if not equal and first.features.codec != "exact" and not recode:
            raise UserError(
                f"{other.path}: its calibration is not that of {first.path}; add --recode to "
                "encode its hidden states again (which adds the error of the codec once more)"
            )


def _corpora(stores: Sequence[FeatureStore]) -> list[Any]:
    found: list[Any] = []
    for store in stores:
        corpus = store.identity.get("corpus")
        inner = corpus.get("merged") if isinstance(corpus, dict) else None
        found += inner if isinstance(inner, list) else [corpus]
    return found


def _documents(store: FeatureStore) -> int:
    """One more than the largest document number."""
    tops = [
        store.part(place).all("sequence/document").max()
        for place in range(len(store.manifest.parts))
    ]
    return int(max(tops)) + 1


def merge(
    sources: Sequence[str | Path],
    target: str | Path,
    recode: bool = False,
    progress: Progress = iter,
) -> None:
    """Join sealed stores of one teacher and one set of features; only their corpus may differ.

    Parts are numbered anew; document numbers of each store follow those of the one before.
    Calibration, files and weights are the first store's. Raises UserError if they do not fit.
    """
    if len(sources) < 2:
        raise UserError("merge needs at least two stores")
    stores = [open_store(path) for path in sources]
    _same_teacher(stores, recode)
    first = stores[0]
    identity = first.identity | {"corpus": {"merged": _corpora(stores)}}
    writer = _begin(target, first, first.features, identity)
    todo, documents = [], 0
    for store in stores:
        todo += [(store, place, documents) for place in range(len(store.manifest.parts))]
        documents += _documents(store)
    for number, (store, place, offset) in progress(list(enumerate(todo))):
        if number not in writer.published:
            _copy_part(writer, number, store, place, first, offset)
    writer.seal()
    for store in stores:
        store.close()
