"""Encoded arrays of a part in another codec, or under another calibration."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from store.errors import StoreError
from store.format import codecs
from store.format.features import Calibration, Features
from store.format.layout import hidden_specs, logits_specs
from support.arrays import Array
from support.errors import UserError

ROWS = 16384
PARTITION = "log_partition"  # float32 in every codec
ENCODED = re.compile(r"view\d+/(hidden/.*|attention/.*|logits/(logprobs|rest|values|scale))")
"""Arrays of a part that another codec or calibration may alter."""


def check_codec(old: str, new: str) -> None:
    """UserError if recoding would claim less error than the store has."""
    if new not in codecs.CODECS:
        raise UserError(f"codec must be one of {', '.join(codecs.CODECS)}, got {new!r}")
    if codecs.CODECS.index(new) < codecs.CODECS.index(old):
        raise UserError(
            f"a store of codec {old!r} cannot become {new!r}: what was lost is lost; "
            f"dump again with --codec {new}"
        )


def recode_part(
    arrays: Mapping[str, Array],
    old: Features,
    new: Features,
    calibration: Calibration,
    target: Calibration,
) -> dict[str, Array]:
    """Arrays of `layout.part_arrays(old)` -> those of `new`, which differs in codec only."""
    result = dict(arrays)
    for view in range(old.views):
        for name in old.hidden:
            same = all(
                np.array_equal(a, b) for a, b in zip(calibration[name], target[name], strict=True)
            )
            if old.codec == new.codec and (same or old.codec == "exact"):
                continue
            path = f"view{view}/hidden/{name}"
            _hidden(result, path, old, new, calibration[name], target[name])
        if old.codec != new.codec:
            _logits(result, f"view{view}/logits", old, new)
            for name in old.attention:
                path = f"view{view}/attention/{name}/values"
                result[path] = _attention(result[path], new.codec)
    return result


def _hidden(
    result: dict[str, Array],
    path: str,
    old: Features,
    new: Features,
    calibration: tuple[Array, Array],
    target: tuple[Array, Array],
) -> None:
    values, scale = result[f"{path}/values"], result.pop(f"{path}/scale", None)
    specs = hidden_specs(new, len(values))
    made = {key: np.empty(spec.shape, spec.dtype) for key, spec in specs.items()}
    for begin in range(0, len(values), ROWS):
        rows = slice(begin, begin + ROWS)
        states = values[rows]
        if scale is not None:
            mean, deviation = calibration
            states = codecs.decode_scaled(states, scale[rows], old.width) * deviation + mean
        encoded = codecs.encode_hidden(new.codec, states, *target, new.group)
        for key, part in zip(made, encoded, strict=True):
            if key == "scale" and not np.isfinite(part).all():
                raise StoreError(f"{path}: states too far from the calibration to be recoded")
            made[key][rows] = part
    result |= {f"{path}/{key}": array for key, array in made.items()}


def _logits(result: dict[str, Array], path: str, old: Features, new: Features) -> None:
    if old.logits is None or old.logits.tier == "sample":
        return
    if old.logits.tier == "topk":
        for key, encodings in (("logprobs", codecs.LOGPROBS), ("rest", codecs.REST)):
            stored, encoding = result[f"{path}/{key}"], encodings[new.codec]
            result[f"{path}/{key}"] = np.concatenate(
                [
                    codecs.encode_logs(encoding, codecs.decode_logs(stored[begin : begin + ROWS]))
                    for begin in range(0, len(stored), ROWS)
                ]
            )
        return
    values, scale = result[f"{path}/values"], result.pop(f"{path}/scale", None)
    specs = logits_specs(new, len(values), 0)
    made = {key: np.empty(specs[key].shape, specs[key].dtype) for key in specs if key != PARTITION}
    for begin in range(0, len(values), ROWS):
        rows = slice(begin, begin + ROWS)
        floats = codecs.decode_head(values[rows], None if scale is None else scale[rows])
        for key, part in zip(made, codecs.encode_head(new.codec, floats), strict=True):
            if not np.isfinite(part).all():
                raise StoreError(f"{path}: head values are too large for codec {new.codec!r}")
            made[key][rows] = part
    result |= {f"{path}/{key}": array for key, array in made.items()}


def _attention(stored: Array, codec: str) -> Array:
    step = ROWS * 64
    pieces = [
        codecs.encode_attention(codec, codecs.decode_attention(stored[begin : begin + step]))
        for begin in range(0, len(stored), step)
    ]
    return np.concatenate(pieces) if pieces else stored
