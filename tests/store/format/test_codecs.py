"""The error of every codec is at most the bound in FORMAT.md."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from teachonce.store.format.codecs.built_in import FIXED_LAST, Fixed, Int4, Int8, Root
from teachonce.store.format.codecs.levels import DEFAULT, EXACT, SMALL
from teachonce.support.arrays import Array

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
def test_hidden_error_is_that_of_the_normalised_value(states: Array) -> None:
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
