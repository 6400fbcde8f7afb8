"""The error of every codec is at most what FORMAT.md states."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from store.format import codecs

law = settings(max_examples=60, deadline=None)
floats = st.floats(-1e5, 1e5, width=32)
matrix = arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=70), elements=floats)
log = st.one_of(st.floats(-200, 0, width=32), st.just(-np.inf))
logs = arrays(np.float32, st.integers(1, 50), elements=log)


def _bound(peak: np.ndarray, levels: int) -> np.ndarray:
    """Half a scale, which is 1.001 * peak / levels or, subnormal, at most 6e-8 too large."""
    return 1.001 * peak / (2 * levels) + 3e-8 + 2e-7 * peak


@law
@given(matrix)
def test_int8_error(values: np.ndarray) -> None:
    codes, scale = codecs.encode_int8(values)
    assert codes.min() >= -127
    assert np.isfinite(scale).all()
    error = np.abs(codecs.decode_int8(codes, scale) - values)
    assert (error <= _bound(np.abs(values).max(axis=1, keepdims=True), 127)).all()
    assert (codecs.decode_int8(codes, scale)[scale == 0] == 0).all()


@law
@given(matrix)
def test_int4_error_by_groups(values: np.ndarray) -> None:
    packed, scale = codecs.encode_int4(values)
    width = values.shape[1]
    assert packed.shape == (len(values), (width + 1) // 2)
    assert scale.shape == (len(values), -(-width // 64))
    error = np.abs(codecs.decode_int4(packed, scale, width) - values)
    for group in range(scale.shape[1]):
        columns = slice(64 * group, 64 * group + 64)
        peak = np.abs(values[:, columns]).max(axis=1, keepdims=True)
        assert (error[:, columns] <= _bound(peak, 7)).all()


def test_int4_nibble_order() -> None:
    values = np.array([[7, -7, 1, -1, 3]], np.float32)
    packed, scale = codecs.encode_int4(values)
    assert scale.tolist() == [[1]]
    assert packed.tolist() == [[0x97, 0xF1, 0x03]]


@law
@given(logs)
def test_fixed_error(values: np.ndarray) -> None:
    read = codecs.decode_fixed(codecs.encode_fixed(values))
    inside = values >= -63.998
    assert (np.abs(read[inside] - values[inside]) <= 2.0**-11).all()
    low = ~inside & np.isfinite(values)
    assert np.allclose(read[low], -codecs.FIXED_LAST / 1024)
    assert (np.isneginf(read) == np.isneginf(values)).all()


@law
@given(logs)
def test_root_error(values: np.ndarray) -> None:
    read = codecs.decode_root(codecs.encode_root(values))
    inside = values >= -63.0
    bound = np.sqrt(-values[inside]) / 32 + 2.0**-12 + 1e-5
    assert (np.abs(read[inside] - values[inside]) <= bound).all()
    low = ~inside & np.isfinite(values)
    assert np.allclose(read[low], -((254 / 32) ** 2))
    assert (np.isneginf(read) == np.isneginf(values)).all()


def test_every_square_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    exact = np.square(codes.astype(np.float32) / np.float32(255))
    assert (codecs.decode_attention(codes) == exact).all()


@law
@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(0, 1, width=32)))
def test_square_error(values: np.ndarray) -> None:
    for codec, step in (("default", 1), ("small", 5)):
        read = codecs.decode_attention(codecs.encode_attention(codec, values))
        assert (np.abs(read - values) <= step * np.sqrt(values) / 255 + 4e-6 * step**2).all()
    assert (codecs.encode_attention("exact", values) == values).all()


@law
@given(matrix)
def test_hidden_error_is_that_of_the_normalised_value(states: np.ndarray) -> None:
    width = states.shape[1]
    mean, deviation = np.linspace(-3, 3, width, dtype="f"), np.linspace(0.1, 5, width, dtype="f")
    values, scale = codecs.encode_hidden("default", states, mean, deviation)
    read = codecs.decode_scaled(values, scale, width) * deviation + mean
    peak = np.abs((states - mean) / deviation).max(axis=1, keepdims=True)
    rounding = 1e-6 * (np.abs(states).max() + 3 + peak * deviation)
    assert (np.abs(read - states) <= _bound(peak, 127) * deviation + rounding).all()


def test_all_codes_are_fixed_points() -> None:
    stored = np.arange(256, dtype=np.uint8)
    assert (codecs.encode_root(codecs.decode_root(stored)) == stored).all()
    assert (codecs.encode_attention("default", codecs.decode_attention(stored)) == stored).all()
    assert (
        codecs.encode_attention("small", codecs.decode_attention(stored[::5])) == stored[::5]
    ).all()
    stored = np.arange(65536, dtype=np.uint16)
    assert (codecs.encode_fixed(codecs.decode_fixed(stored)) == stored).all()


def test_head_codecs() -> None:
    values = np.random.default_rng(0).normal(size=(9, 33)).astype(np.float32)
    half = codecs.decode_head(codecs.encode_head("default", values)[0], None)
    assert (np.abs(half - values) <= np.abs(values) * 2.0**-11 + 2.0**-25).all()
    small = codecs.decode_head(*codecs.encode_head("small", values))
    assert (np.abs(small - values) <= _bound(np.abs(values).max(axis=1, keepdims=True), 127)).all()
    assert (codecs.decode_head(codecs.encode_head("exact", values)[0], None) == values).all()
