"""In the encodings that a store describes, only decoding fields bind, not notes or unknown keys."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachonce.store import Features, FeatureStore, StoreError, open_store
from teachonce.store.format.codecs.levels import LEVELS, Level
from teachonce.store.tools.copy import convert
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from tests.making.stores import begin, features_of, make_part, make_store, put_part, unfinished

EXT = ("zarr", "h5")
FORMS = [(codec, form) for codec, forms in LEVELS.items() for form in range(len(forms))]
NOTES = ("error", "formula", "last", "unknown")
BINDING = [
    ("exact", "hidden", "encoding", "int8"),
    ("exact", "hidden", "normalised", "state = value"),
    ("exact", "attention", "encoding", "square"),
    ("default", "hidden", "encoding", "int4"),
    ("default", "hidden", "normalised", None),
    ("default", "logprobs", "step", 1 / 512),
    ("default", "rest", "minus_infinity", 65534),
    ("default", "head", "encoding", "bfloat16"),
    ("small", "hidden", "group", 48),
    ("small", "hidden", "group", None),
    ("small", "logprobs", "step", 1 / 16),
    ("small", "logprobs", "minus_infinity", 254),
    ("small", "attention", "encoding", "cube"),
]
"""Codec, kind, key, and another value (None: it is missing)."""


def described(codec: str, form: int = 0) -> dict[str, Any]:
    """Describe the features of a store as another program would."""
    features = features_of(codec)
    value = json.loads(json.dumps(features.to_json()))
    value["encodings"] = json.loads(json.dumps(LEVELS[codec][form].encodings()))
    return copy.deepcopy(value)


def reworded(encodings: dict[str, Any]) -> dict[str, Any]:
    """Reword every note, remove one, and add an unknown one."""
    found = copy.deepcopy(encodings)
    for kind in found.values():
        kind.pop("error")
        kind |= {"formula": "see the page", "unknown": [1, {"a": None}]}
        if "normalised" in kind:
            kind["normalised"] = "z times deviation plus mean"
        if kind["encoding"] == "coarse":
            kind["step"] = "five"
    return found | {"later": {"encoding": "int2"}}


def other(encodings: dict[str, Any], kind: str, key: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(encodings)
    if value is None:
        del found[kind][key]
    else:
        found[kind][key] = value
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(
        st.tuples(
            st.sampled_from(("hidden", "logprobs", "rest", "head", "attention")),
            st.sampled_from(NOTES),
            st.one_of(st.none(), st.text(), st.integers(), st.lists(st.text())),
        )
    ),
)
def test_notes_may_say_anything(form: tuple[str, int], notes: list[tuple[str, str, Any]]) -> None:
    value = described(*form)
    plain = Features.from_json(described(*form))
    for kind, key, said in notes:
        value["encodings"][kind][key] = said
    assert Features.from_json(value) == plain and plain.form == form[1]
    for kind, key, _ in notes:
        value["encodings"][kind].pop(key, None)
    assert Features.from_json(value) == plain


@pytest.mark.parametrize(("codec", "kind", "key", "value"), BINDING)
def test_what_decodes_otherwise_is_named(codec: str, kind: str, key: str, value: Any) -> None:
    features = described(codec)
    expected = features["encodings"][kind].get(key)
    features["encodings"] = other(features["encodings"], kind, key, value)
    with pytest.raises(StoreError) as caught:
        Features.from_json(features)
    message = str(caught.value)
    assert f"encodings.{kind}.{key} of codec '{codec}' is {json.dumps(value)}, " in message
    assert f"expected {json.dumps(expected)};" in message and "\n" not in message


@pytest.mark.parametrize("value", [None, [], "small", {}, {"hidden": []}, {"hidden": None}])
def test_encodings_of_another_shape(value: object) -> None:
    with pytest.raises(StoreError, match="encodings"):
        Features.from_json(described("small") | {"encodings": value})


def written(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> pytest.MonkeyPatch:
    """Make software describe its encodings differently in stores written from now on."""
    real = Level.encodings
    monkeypatch.setattr(Level, "encodings", lambda self, *kinds: change(real(self, *kinds)))
    return monkeypatch


def assert_reads_alike(one: FeatureStore, two: FeatureStore) -> None:
    assert one.features == two.features and one.manifest.content() == two.manifest.content()
    for left, right in zip(one, two, strict=True):
        for seen, again in zip(left.views, right.views, strict=True):
            assert np.array_equal(seen.hidden["mean"], again.hidden["mean"])
            assert np.array_equal(seen.attention["mean"], again.attention["mean"])
            assert np.array_equal(seen.logits.logprobs, again.logits.logprobs)


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize("codec", LEVELS)
def test_a_store_in_other_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ext: str, codec: str
) -> None:
    """A store with reworded encodings is read like any other, is sound, and can be copied."""
    features, path = features_of(codec), tmp_path / f"worded.{ext}"
    with monkeypatch.context() as patch:
        written(patch, reworded)
        make_store(path, features, parts=2)
    make_store(tmp_path / f"plain.{ext}", features, parts=2)
    store, plain = open_store(path), open_store(tmp_path / f"plain.{ext}")
    assert store.meta["features"] != plain.meta["features"]
    assert store.meta["features"]["encodings"] == reworded(plain.meta["features"]["encodings"])
    assert_reads_alike(store, plain)
    assert verify(path).problems == []
    convert(path, tmp_path / f"copy.{ext}")
    assert open_store(tmp_path / f"copy.{ext}").meta["features"] == plain.meta["features"]
    merge([path, tmp_path / f"plain.{ext}"], tmp_path / f"merged.{ext}")
    assert len(open_store(tmp_path / f"merged.{ext}")) == 2 * len(plain)


@pytest.mark.parametrize("ext", EXT)
def test_an_unfinished_store_in_other_words_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ext: str
) -> None:
    features, path = features_of("small"), tmp_path / f"a.{ext}"
    with monkeypatch.context() as patch:
        written(patch, reworded)
        unfinished(path, features)
    writer = begin(path, features)
    assert writer.published == {0}
    put_part(writer, 1, make_part(features, 1))
    writer.seal()
    make_store(tmp_path / f"plain.{ext}", features, parts=2)
    store, plain = open_store(path), open_store(tmp_path / f"plain.{ext}")
    assert_reads_alike(store, plain)
    assert store.meta["features"]["encodings"] == reworded(plain.meta["features"]["encodings"])
