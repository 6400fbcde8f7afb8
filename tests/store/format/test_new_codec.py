"""A codec of another package is written, read, streamed, recoded and compared: a new codec needs
only its object and its entry in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teachonce.feature_store.cli import main
from teachonce.store import StoreError, open_store
from teachonce.store.format.codecs import levels
from teachonce.store.format.codecs.built_in import Float32
from teachonce.store.format.codecs.codec import (
    FAST,
    Codec,
    CodecArray,
    Elementwise,
    HiddenCodec,
    wide,
)
from teachonce.store.format.codecs.levels import LEVELS, Level, bound
from teachonce.store.tools.copy import convert
from teachonce.store.tools.verify import verify
from teachonce.student_train.data.batch import StreamedFeatures
from teachonce.student_train.data.cache import ResidentFeatures
from teachonce.support.arrays import Array, Floats
from teachonce.support.errors import UserError
from tests.end_to_end.support import ok, refused
from tests.making.stores import features_of, make_store

EXT = ("zarr", "h5")


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
        found = wide(stored["values"], xp) * stored["step"][:, None]
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
        return wide(codes, xp) * np.float32(0.1)

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
        "from tests.store.format.test_new_codec import HiddenCodec, Level, Range, Tenth\n"
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
