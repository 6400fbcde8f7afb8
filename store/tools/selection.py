"""Take some sequences of a part: the arrays of a part that holds these alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from teachonce.store.format.dimensions import dimension_names
from teachonce.store.format.features import Features
from teachonce.store.format.layout import Counts
from teachonce.support.arrays import Array, ranges, starts


def selected(
    arrays: Mapping[str, Array], features: Features, keep: Array
) -> tuple[Counts, dict[str, Array]]:
    """Return counts and arrays of a part with those sequences alone for which `keep` bool [n] is
    true; `arrays` are all of the part, by path.

    What an array has a row for, its first dimension names (FORMAT.md, section 6).
    """
    lengths = np.diff(arrays["sequence/token_start"])
    sequences = np.flatnonzero(keep)
    tokens = _rows(starts(lengths), sequences)
    rows = {"sequence": sequences, "token": tokens}
    found = {}
    for name, array in arrays.items():
        kind = dimension_names(name, array.ndim)[0]
        if kind.endswith("_edge"):
            found[name] = starts(np.diff(array)[rows[kind.removesuffix("_edge")]])
        elif kind in rows:
            found[name] = array[rows[kind]]
        else:
            found[name] = array[_rows(*_ragged(name, kind, arrays, lengths, rows))]
    return _counts(features, found), found


def _ragged(
    name: str, kind: str, arrays: Mapping[str, Array], lengths: Array, rows: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Where the rows of each sequence, or of each token, begin in an array; and which to take."""
    group = name.rpartition("/")[0]
    if kind == "byte":
        return arrays["sequence/text_start"], rows["sequence"]
    if kind == "token_pair":
        return starts(lengths**2), rows["sequence"]
    of = {"masked_word": "sequence", "draw": "token"}[kind]
    return arrays[f"{group}/start"], rows[of]


def _rows(start: Array, chosen: Array) -> Array:
    return ranges(start[chosen], np.diff(start)[chosen])


def _counts(features: Features, arrays: Mapping[str, Array]) -> Counts:
    lengths = np.diff(arrays["sequence/token_start"])

    def ragged(name: str) -> tuple[int, ...]:
        paths = [f"view{view}/{name}" for view in range(features.views)]
        return tuple(len(arrays[path]) if path in arrays else 0 for path in paths)

    sampled = features.logits is not None and features.logits.tier == "sample"
    return Counts(
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        squares=int((lengths**2).sum()),
        text_bytes=len(arrays["text/utf8"]),
        spans=ragged("mask/begin"),
        draws=ragged("logits/ids") if sampled else (0,) * features.views,
    )
