"""Codecs: their errors, their encodings in a store, and codecs of other packages.

- The error of every codec is at most the bound in FORMAT.md.
- In the encodings that a store describes, only decoding fields bind, not notes or unknown keys.
- A codec of another package is written, read, streamed, recoded and compared: a new codec needs
  only its object and its entry in the registry.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from teachonce.feature_store.cli import main
from teachonce.store import Features, FeatureStore, StoreError, open_store
from teachonce.store.format.codecs import levels
from teachonce.store.format.codecs.built_in import FIXED_LAST, Fixed, Float32, Int4, Int8, Root
from teachonce.store.format.codecs.codec import (
    FAST,
    Codec,
    CodecArray,
    Elementwise,
    HiddenCodec,
    as_float32,
)
from teachonce.store.format.codecs.levels import DEFAULT, EXACT, LEVELS, SMALL, Level, bound
from teachonce.store.tools.copy import convert
from teachonce.store.tools.merge import merge
from teachonce.store.tools.verify import verify
from teachonce.student_train.data.batch import StreamedFeatures
from teachonce.student_train.data.cache import ResidentFeatures
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok, refused
from tests.making.stores import begin, features_of, make_part, make_store, put_part, unfinished

INT8, INT4, FIXED, ROOT = Int8(), Int4(64), Fixed(), Root()
law = settings(max_examples=60, deadline=None)
floats = st.floats(-1e5, 1e5, width=32)
matrix = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=70), elements=floats)
log = st.one_of(st.floats(-200, 0, width=32), st.just(-np.inf))
logs = arrays(np.float32, st.integers(1, 50), elements=log)


def _bound(peak: Array, levels: int) -> Array:
    """Return half a scale; it is 1.001 * peak / levels, or, if subnormal, up to 6e-8 more."""
    return 1.001 * peak / (2 * levels) + 3e-8 + 2e-7 * peak


@law
@given(matrix)
def test_int8_error(values: Array) -> None:
    stored, row = INT8.encode(values), values.shape[1:]
    codes, scale = stored["values"], stored["scale"]
    assert codes.min() >= -127
    assert np.isfinite(scale).all()
    error = np.abs(INT8.decode(stored, row) - values)
    assert (error <= _bound(np.abs(values).max(axis=1, keepdims=True), 127)).all()
    assert (INT8.decode(stored, row)[scale == 0] == 0).all()


@law
@given(matrix)
def test_int4_error_by_groups(values: Array) -> None:
    stored = INT4.encode(values)
    packed, scale = stored["values"], stored["scale"]
    width = values.shape[1]
    assert packed.shape == (len(values), (width + 1) // 2)
    assert scale.shape == (len(values), -(-width // 64))
    error = np.abs(INT4.decode(stored, (width,)) - values)
    for group in range(scale.shape[1]):
        columns = slice(64 * group, 64 * group + 64)
        peak = np.abs(values[:, columns]).max(axis=1, keepdims=True)
        assert (error[:, columns] <= _bound(peak, 7)).all()


def test_int4_nibble_order() -> None:
    values = np.array([[7, -7, 1, -1, 3]], np.float32)
    stored = INT4.encode(values)
    assert stored["scale"].tolist() == [[1]]
    assert stored["values"].tolist() == [[0x97, 0xF1, 0x03]]


@law
@given(logs)
def test_fixed_error(values: Array) -> None:
    read = FIXED.from_codes(FIXED.to_codes(values))
    inside = values >= -63.998
    assert (np.abs(read[inside] - values[inside]) <= 2.0**-11).all()
    low = ~inside & np.isfinite(values)
    assert np.allclose(read[low], -FIXED_LAST / 1024)
    assert (np.isneginf(read) == np.isneginf(values)).all()


@law
@given(logs)
def test_root_error(values: Array) -> None:
    read = ROOT.from_codes(ROOT.to_codes(values))
    inside = values >= -63.0
    bound = np.sqrt(-values[inside]) / 32 + 2.0**-12 + 1e-5
    assert (np.abs(read[inside] - values[inside]) <= bound).all()
    low = ~inside & np.isfinite(values)
    assert np.allclose(read[low], -((254 / 32) ** 2))
    assert (np.isneginf(read) == np.isneginf(values)).all()


def test_every_square_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    exact = np.square(codes.astype(np.float32) / np.float32(255))
    assert (DEFAULT.attention.from_codes(codes) == exact).all()


@law
@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(0, 1, width=32)))
def test_square_error(values: Array) -> None:
    for level, step in ((DEFAULT, 1), (SMALL, 5)):
        read = level.attention.from_codes(level.attention.to_codes(values))
        assert (np.abs(read - values) <= step * np.sqrt(values) / 255 + 4e-6 * step**2).all()
    assert (EXACT.attention.to_codes(values) == values).all()


@law
@given(matrix)
def test_hidden_error_matches_the_normalised_value(states: Array) -> None:
    width = states.shape[1]
    mean, deviation = np.linspace(-3, 3, width, dtype="f"), np.linspace(0.1, 5, width, dtype="f")
    stored = DEFAULT.hidden.encode(states, mean, deviation)
    read = DEFAULT.hidden.decode(stored, mean, deviation)
    peak = np.abs((states - mean) / deviation).max(axis=1, keepdims=True)
    rounding = 1e-6 * (np.abs(states).max() + 3 + peak * deviation)
    assert (np.abs(read - states) <= _bound(peak, 127) * deviation + rounding).all()


def test_all_codes_are_fixed_points() -> None:
    stored = np.arange(256, dtype=np.uint8)
    assert (ROOT.to_codes(ROOT.from_codes(stored)) == stored).all()
    square, coarse = DEFAULT.attention, SMALL.attention
    assert (square.to_codes(square.from_codes(stored)) == stored).all()
    assert (coarse.to_codes(coarse.from_codes(stored[::5])) == stored[::5]).all()
    stored = np.arange(65536, dtype=np.uint16)
    assert (FIXED.to_codes(FIXED.from_codes(stored)) == stored).all()


def test_head_codecs() -> None:
    values = np.random.default_rng(0).normal(size=(9, 33)).astype(np.float32)
    half, small, exact = (
        level.head.decode(level.head.encode(values), values.shape[1:])
        for level in (DEFAULT, SMALL, EXACT)
    )
    assert (np.abs(half - values) <= np.abs(values) * 2.0**-11 + 2.0**-25).all()
    assert (np.abs(small - values) <= _bound(np.abs(values).max(axis=1, keepdims=True), 127)).all()
    assert (exact == values).all()


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
def test_an_unfinished_store_with_other_descriptions_is_continued(
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


class Range(Codec):
    """Codes 0..255 between the smallest and the largest value of a token: three arrays."""

    name = "range"
    names = ("values", "low", "step")

    @property
    def description(self) -> dict[str, Any]:
        return {"encoding": "range", "formula": "value = low[token] + code * step[token]"}

    def arrays(self, row: tuple[int, ...]) -> dict[str, CodecArray]:
        ends = CodecArray(np.dtype(np.float32), row[:-1], FAST)
        return {"values": CodecArray(np.dtype(np.uint8), row, FAST), "low": ends, "step": ends}

    def encode(self, values: Floats) -> dict[str, Array]:
        low = values.min(axis=1)
        step = np.maximum((values.max(axis=1) - low) / 255, 1e-9).astype(np.float32)
        codes = np.clip(np.rint((values - low[:, None]) / step[:, None]), 0, 255)
        return {"values": codes.astype(np.uint8), "low": low, "step": step}

    def decode(self, stored: Mapping[str, Any], row: tuple[int, ...], xp: Any = np) -> Any:
        found = as_float32(stored["values"], xp) * stored["step"][:, None]
        found += stored["low"][:, None]
        return found

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        spread = np.ptp(values, axis=1) if stored is None else stored["step"] * 255
        return np.broadcast_to(spread[:, None] / 500, values.shape)


class Tenth(Elementwise):
    """Tenths of a number between -100 and 1, in an int16."""

    name = "tenth"
    dtype = np.dtype(np.int16)
    binds = ("step",)
    lowest = -100.0
    description = {"encoding": "tenth", "step": 0.1}

    def to_codes(self, values: Floats) -> Array:
        codes: Array = np.rint(np.maximum(values, self.lowest) * 10).astype(np.int16)
        return codes

    def from_codes(self, codes: Any, xp: Any = np) -> Any:
        return as_float32(codes, xp) * np.float32(0.1)

    def bound(self, values: Floats, stored: Mapping[str, Array] | None = None) -> Array:
        return np.full(values.shape, 0.0501)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Level:
    """Return the registry's entry."""
    level = Level(HiddenCodec(Range()), Tenth(), Tenth(), Range(), Tenth())
    monkeypatch.setitem(LEVELS, "tiny", (level,))
    return level


@pytest.mark.parametrize("ext", EXT)
@pytest.mark.parametrize("tier", ["topk", "head"])
def test_it_is_all_there_is(tmp_path: Path, tiny: Level, ext: str, tier: str) -> None:
    parts = make_store(tmp_path / f"a.{ext}", features_of("tiny", tier))
    assert verify(tmp_path / f"a.{ext}").problems == []
    store = open_store(tmp_path / f"a.{ext}")
    mean, deviation = store.calibration["mean"]
    for index in (0, 17, 35):
        record, part, place = store[index], parts[index // 12], index % 12
        begin = int(part.token_counts[:place].sum())
        rows = slice(begin, begin + int(part.token_counts[place]))
        for number, view in enumerate(record.views):
            states = part.hidden[number, "mean"][rows]
            error = np.abs(view.hidden["mean"] - states) / deviation
            allowed = bound(tiny, "hidden", (states - mean) / deviation)
            assert error.any() and (error <= allowed + 1e-3).all()
            maps = part.attention[number, "mean"][place]
            assert (np.abs(view.attention["mean"] - maps) <= 0.0501).all()
            put = part.logits[number]
            if tier == "topk":
                logs = np.maximum(put["logprobs"][rows], -100)
                assert (np.abs(view.logits.logprobs - logs) <= 0.0501).all()
            else:
                values = put["values"][rows]
                error = np.abs(view.logits.values - values)
                assert (error <= bound(tiny, "head", values) + 1e-6).all()


def test_streams_and_devices_decode_it(tmp_path: Path, tiny: Level) -> None:
    make_store(tmp_path / "a.zarr", features_of("tiny"))
    store = open_store(tmp_path / "a.zarr")
    sources = (StreamedFeatures(), ResidentFeatures(store, torch.device("cpu")))
    for batch in store.stream(0, 0, 200, view=1):
        records = [store[int(index)].views[1] for index in batch.index]
        states = np.concatenate([view.hidden["mean"] for view in records])
        maps = np.concatenate([view.attention["mean"].ravel() for view in records])
        np.testing.assert_array_equal(batch.hidden["mean"].states(), states)
        np.testing.assert_array_equal(batch.attention["mean"], maps)
        rows = np.arange(len(states))
        for source in sources:
            taught = source.states(batch, 1, rows, torch.from_numpy(rows))["mean"]
            np.testing.assert_allclose(
                taught.pooled(normalised=False), states, rtol=1e-6, atol=1e-6
            )
            entries, begin, codec = source.maps(batch, 1)
            length = int(batch.start[1] - batch.start[0])
            first = entries["mean"][int(begin[0]) : int(begin[0]) + length**2]
            np.testing.assert_array_equal(codec.from_codes(first, torch), maps[: length**2])


def test_decoding_leaves_the_stored_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Float32` returns the stored array, which a level that normalises it must not change."""
    level = replace(levels.EXACT, hidden=HiddenCodec(Float32()))
    monkeypatch.setitem(LEVELS, "tiny", (level,))
    parts = make_store(tmp_path / "a.zarr", features_of("tiny"), parts=1)
    store = open_store(tmp_path / "a.zarr")
    store.cache_arrays(lambda name: True)
    for batch in store.stream(shuffle=False):
        for _ in range(2):
            states = batch.hidden["mean"].states()
            np.testing.assert_allclose(states, parts[0].hidden[0, "mean"], atol=1e-3)
        np.testing.assert_array_equal(store[0].views[0].hidden["mean"], states[: batch.start[1]])


@pytest.mark.parametrize("tier", ["topk", "head"])
def test_stores_are_recoded_to_it_and_not_back(tmp_path: Path, tiny: Level, tier: str) -> None:
    make_store(tmp_path / "exact.zarr", features_of("exact", tier))
    make_store(tmp_path / "tiny.h5", features_of("tiny", tier))
    convert(tmp_path / "exact.zarr", tmp_path / "copy.h5", codec="tiny")
    one, two = open_store(tmp_path / "tiny.h5"), open_store(tmp_path / "copy.h5")
    assert one.manifest.content() == two.manifest.content() and two.features.codec == "tiny"
    assert two.meta["features"]["encodings"]["rest"] == {"encoding": "tenth", "step": 0.1}
    with pytest.raises(UserError, match="cannot become 'exact': encoding has rounded its values"):
        convert(tmp_path / "copy.h5", tmp_path / "back.h5", codec="exact")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make importable a package that adds a codec, and one that cannot be loaded."""
    monkeypatch.setattr(levels, "LEVELS", dict(LEVELS))
    folder = tmp_path / "site"
    (folder / "mine-1.0.dist-info").mkdir(parents=True)
    (folder / "mine-1.0.dist-info/METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (folder / "mine-1.0.dist-info/entry_points.txt").write_text(
        "[teachonce.codecs]\nmine = codec_of_mine:MINE\nbroken = codec_of_mine:ABSENT\n"
    )
    (folder / "codec_of_mine.py").write_text(
        "from tests.store.format.test_codecs import HiddenCodec, Level, Range, Tenth\n"
        "MINE = Level(HiddenCodec(Range()), Tenth(), Tenth(), Range(), Tenth())\n"
    )
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_a_codec(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.zarr", tmp_path / "b.h5"
    make_store(path, features_of("mine"))
    make_store(tmp_path / "exact.zarr", features_of("exact"))
    command = ("convert", tmp_path / "exact.zarr", copy, "--codec")
    ok(main, *command, "mine")
    levels.LEVELS.pop("mine")  # as in a process that has not loaded it
    for store in (path, copy):
        assert verify(store).problems == []
        assert open_store(store).features.codec == "mine"
    for word, printed in (
        ("zip", "--codec zip: expected one of exact,"),
        ("broken", "cannot be loaded"),
    ):
        assert printed in refused(main, *command, word)
    for codec in ("exact", "tiny"):
        with pytest.raises(StoreError if codec == "tiny" else UserError):
            convert(copy, tmp_path / "c.h5", codec=codec)


@pytest.mark.usefixtures("installed")
def test_a_codec_that_nobody_adds_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "a.zarr", features_of("mine"))
    levels.LEVELS.pop("mine")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="codec must be one of exact, default, small, got 'mine'"):
        open_store(tmp_path / "a.zarr")


def test_metadata_of_packages_are_read_for_unknown_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: pytest.fail("was called"))
    make_store(tmp_path / "a.zarr", features_of("small"), parts=1)
    assert len(open_store(tmp_path / "a.zarr")) == 12
