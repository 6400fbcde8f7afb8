"""Stores at an address: the features of a small store, and the output of a stream from it."""

import dataclasses

from teachonce.store import FeatureStore
from teachonce.support.arrays import Array
from tests.making.stores import features_of

STATES_ALONE = dataclasses.replace(features_of(tier=None, views=1), hidden=("mean",), attention=())


def streamed(fs: FeatureStore) -> list[Array]:
    return [
        array.copy()
        for batch in fs.stream(seed=1, batch_tokens=400)
        for array in batch.stored.values()
    ]


def assert_same(one: list[Array], other: list[Array]) -> None:
    assert len(one) == len(other) > 0
    assert all((a == b).all() for a, b in zip(one, other, strict=True))
