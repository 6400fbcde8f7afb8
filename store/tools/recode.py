"""Encode the arrays of a part again: in another codec, or under another calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.codecs.built_in import look_up, rank_ids
from teachonce.store.format.codecs.codec import Codec, CodecArray, Elementwise
from teachonce.store.format.codecs.levels import BUILT_IN, forms_of
from teachonce.store.format.features import Calibration, Features
from teachonce.store.format.layout import EMBEDDING
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError

# A float32 copy of these rows takes 50 MB at hidden size 768.
ROWS = 16384
# The logits' ids, counts and log-partitions are exact in every codec (FORMAT.md, section 7).
ENCODED = re.compile(
    r"view\d+/(hidden/.*|attention/.*|logits/(?!(ids|places|distinct|log_partition|start|counts)$).*)"
    r"|sequence/embedding/.*"
)
"""Arrays of a part that another codec or calibration may alter."""


def same_calibration(one: Calibration, other: Calibration) -> bool:
    """Return whether `other` has the means and standard deviations of `one`."""
    return all(
        np.array_equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def check_codec(path: str, old: str, new: str) -> None:
    """Raise UserError if the new codec of the store at `path` claims less error than its values
    have."""
    forms_of(new)  # raises for an unknown codec
    # How much a codec of another package loses is not known: nothing is recoded from it.
    to_added = old in BUILT_IN and new not in BUILT_IN
    to_smaller = old in BUILT_IN[: BUILT_IN.index(new)] if new in BUILT_IN else False
    if not (new == old or to_added or to_smaller):
        raise UserError(
            f"{path}: its codec {old!r} cannot become {new!r}: encoding has rounded its values,"
            f" which cannot be undone; dump again with --codec {new}"
        )


def recode_part(
    arrays: Mapping[str, Array],
    old: Features,
    new: Features,
    calibration: Calibration,
    target: Calibration,
) -> dict[str, Array]:
    """Convert the arrays of a part from the codec of `old` to the codec of `new`, and ids to ranked
    ids or back; the features are otherwise equal."""
    result = dict(arrays)
    if old.embedding and old.level.embedding != new.level.embedding:
        codecs = old.level.embedding, new.level.embedding
        _rows(result, EMBEDDING, old.embedding.width, *codecs, new.codec)
    for view in range(old.views):
        for name in old.hidden:
            same = same_calibration({name: calibration[name]}, target)
            if old.level == new.level and (same or not old.level.hidden.normalised):
                continue
            path = f"view{view}/hidden/{name}"
            _hidden(result, path, old, new, calibration[name], target[name])
        if old.logits and new.logits and old.logits.ranked != new.logits.ranked:
            _ranks(result, f"view{view}/logits", new.logits.ranked)
        if old.level != new.level:
            _logits(result, f"view{view}/logits", old, new)
            for name in old.attention:
                path = f"view{view}/attention/{name}/values"
                _codes(result, path, old.level.attention, new.level.attention)
    return result


def _hidden(
    result: dict[str, Array],
    path: str,
    old: Features,
    new: Features,
    calibration: tuple[Array, Array],
    target: tuple[Array, Array],
) -> None:
    old_codec, new_codec = old.level.hidden, new.level.hidden
    _recode(
        result,
        path,
        old_codec.names,
        new_codec.codec.arrays((new.width,)),
        lambda stored: new_codec.encode(old_codec.decode(stored, *calibration), *target),
        f"{path}: some hidden states are too far from the mean for this codec; give --codec exact",
    )


def _ranks(result: dict[str, Array], path: str, ranked: bool) -> None:
    """Convert the ids of logits in `result`: if `ranked`, to places and a list of distinct ids;
    else from these two arrays back to ids."""
    if ranked:
        pair = rank_ids(result.pop(f"{path}/ids"))
        result[f"{path}/places"], result[f"{path}/distinct"] = pair
        return
    # `look_up` writes the ids over the places, which belong to the caller.
    ids = result.pop(f"{path}/places").copy()
    look_up(result.pop(f"{path}/distinct"), ids, ids)
    result[f"{path}/ids"] = ids


def _logits(result: dict[str, Array], path: str, old: Features, new: Features) -> None:
    if old.logits is None:
        return
    if old.logits.observed:
        _codes(result, f"{path}/observed", old.level.rest, new.level.rest)
    if old.logits.tier == "topk":
        _codes(result, f"{path}/logprobs", old.level.logprobs, new.level.logprobs)
        _codes(result, f"{path}/rest", old.level.rest, new.level.rest)
    elif old.logits.tier == "head":
        _rows(result, path, old.logits.size, old.level.head, new.level.head, new.codec)


def _rows(
    result: dict[str, Array], path: str, width: int, old: Codec, new: Codec, codec: str
) -> None:
    """Recode the arrays of group `path`, rows of `width` values, in `result`, in place. codec: name
    of the new level, for errors."""
    _recode(
        result,
        path,
        old.names,
        new.arrays((width,)),
        lambda stored: new.encode(old.decode(stored, (width,))),
        f"{path}: values are too large for codec {codec!r}; give another --codec",
    )


def _codes(result: dict[str, Array], path: str, old: Elementwise, new: Elementwise) -> None:
    """Recode the array at `path`, which has a code for each value, in `result`, in place."""
    group, _, name = path.rpartition("/")
    _recode(
        result,
        group,
        [name],
        {name: new.arrays(result[path].shape[1:])["values"]},
        lambda stored: {name: new.to_codes(old.from_codes(stored[name]))},
        f"{path}: values are too large for the codec; give another --codec",
    )


def _recode(
    result: dict[str, Array],
    group: str,
    names: Iterable[str],
    arrays: Mapping[str, CodecArray],
    encode: Callable[[dict[str, Array]], dict[str, Array]],
    problem: str,
) -> None:
    """Replace the arrays `names` of a group by `arrays`, filled with `encode(stored)` some rows at
    a time.

    Raises StoreError with the text `problem` if a scale or value becomes infinite.
    """
    stored = {name: result.pop(f"{group}/{name}") for name in names}
    rows = len(next(iter(stored.values())))
    recoded = {key: np.empty((rows, *array.row), array.dtype) for key, array in arrays.items()}
    # A million single values take 4 MB of float32.
    step = ROWS if any(array.ndim > 1 for array in stored.values()) else ROWS * 64
    for begin in range(0, rows, step):
        block = slice(begin, begin + step)
        for key, part in encode({name: array[block] for name, array in stored.items()}).items():
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                raise StoreError(problem)
            recoded[key][block] = part
    result |= {f"{group}/{name}": array for name, array in recoded.items()}
