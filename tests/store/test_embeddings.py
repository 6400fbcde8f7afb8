"""One vector for each text: written, read, recoded and merged, within the angle of each codec."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachonce.store import EmbeddingSpec, Features, StoreError, open_store
from teachonce.store.format.codecs.levels import LEVELS, bound
from teachonce.store.tools.copy import convert
from teachonce.store.tools.info import info_lines
from teachonce.store.tools.merge import merge
from teachonce.store.tools.show import headline, sequence_facts
from teachonce.store.tools.verify import verify
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError
from tests.making.stores import Made, begin, features_of, make_part, make_store, put_part

COSINES = {"exact": 1 - 1e-6, "default": 1 - 3e-4, "small": 0.98}
"""The least cosine of a vector of some hundred normal numbers, decoded, with itself."""


def alone(codec: str = "default") -> Features:
    """Return the features of vectors without anything else."""
    return replace(features_of(codec, "embedding"), views=1, hidden=(), attention=())


def cosines(one: Array, other: Array) -> Array:
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    found: Array = (one * other).sum(axis=-1) / lengths
    return found


@pytest.mark.parametrize("ext", ("zarr", "h5"))
@pytest.mark.parametrize("codec", LEVELS)
def test_vectors_come_back(made: Made, ext: str, codec: str) -> None:
    path, parts = made(ext, codec, "embedding")
    fs = open_store(path)
    wanted = np.concatenate([part.vectors for part in parts])
    found = fs.embeddings()
    limit = bound(fs.features.level, "embedding", wanted)
    assert found.dtype == np.float32 and (np.abs(found - wanted) <= limit + 1e-7).all()
    assert cosines(found, wanted).min() > COSINES[codec]
    assert all(np.array_equal(record.embedding, found[record.index]) for record in fs)
    for batch in fs.stream(seed=3, batch_tokens=200):
        vectors = batch.embedding
        assert vectors is not None and np.array_equal(vectors, found[batch.index])
        assert batch.token_ids[0] == 2 and "mean" in batch.hidden
    (unread, *_) = fs.stream(features=("hidden",))
    assert unread.embedding is None
    assert verify(path).problems == []


@given(st.integers(1, 200), st.floats(-6, 4), st.integers(0, 2**32 - 1))
def test_the_cosine_is_bound_by_the_codec(width: int, power: float, seed: int) -> None:
    """The angle between a vector and its stored form has a sine of at most |error| / |vector|."""
    values = np.random.default_rng(seed).normal(size=(3, width)) * 10**power
    vectors = values.astype(np.float32)
    for forms in LEVELS.values():
        codec = forms[0].embedding
        stored = codec.encode(vectors)
        kept = codec.decode(stored, (width,))
        error = np.linalg.norm(codec.bound(vectors, stored), axis=1)
        sine = np.minimum(1, error / np.linalg.norm(vectors, axis=1))
        some = np.linalg.norm(kept, axis=1) > 0
        assert (cosines(kept[some], vectors[some]) >= np.sqrt(1 - sine**2)[some] - 1e-5).all()


def test_a_store_of_vectors_alone_is_small(tmp_path: Path) -> None:
    """A store of vectors takes 384 int8 channels and a scale for each text, plus the text."""
    features = replace(alone(), embedding=EmbeddingSpec(384, "mean"), max_length=256)
    make_store(tmp_path / "a.h5", features, parts=1, sequences=2048)
    fs = open_store(tmp_path / "a.h5")
    part = fs.part(0)
    names = [name for name in part.names() if not name.startswith(("text/", "token/"))]
    stored = {n: fs.source.stored_bytes(f"parts/0/{n}") for n in names}  # type: ignore[attr-defined]
    assert 386 <= sum(stored.values()) / len(fs) < 400, stored


def test_conversions_and_merges(made: Made, tmp_path: Path) -> None:
    path, parts = made("zarr", "exact", "embedding")
    convert(path, tmp_path / "small.h5", "small")
    small = open_store(tmp_path / "small.h5")
    wanted = np.concatenate([part.vectors for part in parts])
    assert cosines(small.embeddings(), wanted).min() > COSINES["small"]
    assert verify(tmp_path / "small.h5").problems == []
    convert(tmp_path / "small.h5", tmp_path / "again.zarr")
    assert np.array_equal(open_store(tmp_path / "again.zarr").embeddings(), small.embeddings())
    merge([tmp_path / "small.h5", tmp_path / "again.zarr"], tmp_path / "both.zarr")
    assert np.array_equal(
        open_store(tmp_path / "both.zarr").embeddings(), np.tile(small.embeddings(), (2, 1))
    )
    make_store(tmp_path / "other.zarr", replace(alone(), embedding=EmbeddingSpec(33, "cls")))
    make_store(tmp_path / "one.zarr", alone())
    with pytest.raises(UserError, match=r"embedding\.pooling is mean and cls"):
        merge([tmp_path / "one.zarr", tmp_path / "other.zarr"], tmp_path / "no.zarr")


def test_people_are_reported(made: Made, tmp_path: Path) -> None:
    make_store(tmp_path / "alone.zarr", alone())
    assert "hidden      none\n" in "\n".join(info_lines(open_store(tmp_path / "alone.zarr")))
    fs = open_store(made("zarr", "default", "embedding")[0])
    assert ", embedding; " in repr(fs)
    lines = "\n".join(info_lines(fs))
    assert "embedding   size 33, mean, of length 1, prompt 'the story '" in lines
    assert "embedding of length 1.0" in headline(sequence_facts(fs, 2))
    with pytest.raises(StoreError, match="no embedding in this store"):
        _ = open_store(made("zarr")[0])[0].embedding
    with pytest.raises(StoreError, match="holds no embedding; dump with --head embedding"):
        open_store(made("zarr")[0]).embeddings()


@pytest.mark.parametrize(
    "value, message",
    (
        ({"width": 0, "pooling": "mean"}, "width of the embedding must be a whole number"),
        ({"width": 3}, "embedding must have width and pooling"),
        ({"width": 3, "pooling": 4}, "pooling must be a string"),
        ({"width": 3, "pooling": "mean", "normalised": 1}, "normalised must be true or absent"),
        ({"width": 3, "pooling": "mean", "turned": True}, "embedding must have width and pooling"),
        ({"width": 3, "pooling": "mean", "normalised": False}, "normalised must be true or absent"),
        ({"width": 3, "pooling": "mean", "parallel": False}, "parallel must be true or absent"),
        ({"width": 3, "pooling": "mean", "prompt": ""}, "prompt of embedding is '': omit the key"),
    ),
)
def test_what_is_no_embedding(value: dict[str, Any], message: str) -> None:
    features = json.loads(json.dumps(alone().to_json()))
    assert Features.from_json(features) == alone()
    with pytest.raises(StoreError, match=message):
        Features.from_json(features | {"embedding": value})


def test_another_encoding_of_vectors_is_refused() -> None:
    features = json.loads(json.dumps(alone().to_json()))
    features["encodings"]["embedding"]["encoding"] = "int2"
    with pytest.raises(StoreError, match=r"encodings.embedding.encoding of codec 'default'"):
        Features.from_json(features)
    assert "embedding" not in features_of().to_json()["encodings"]


def test_vectors_that_cannot_be_kept(tmp_path: Path) -> None:
    features = alone()
    made = make_part(features, 0, 3)
    assert made.vectors is not None
    made.vectors[1, 4] = np.nan
    with pytest.raises(StoreError, match="sequence 1, token 0: sequence/embedding is NaN"):
        put_part(begin(tmp_path / "a.zarr", features), 0, made)
    made.vectors = None
    with pytest.raises(StoreError, match="not written: sequence/embedding"):
        put_part(begin(tmp_path / "b.zarr", features), 0, made)
    made.vectors = np.ones((3, 5), np.float32)
    with pytest.raises(StoreError, match=r"shape \[\d, 5\], expected \[\d, 33\]"):
        put_part(begin(tmp_path / "c.zarr", features), 0, made)
