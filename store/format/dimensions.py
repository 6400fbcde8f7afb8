"""The names of the dimensions of every stored array, by which xarray opens a Zarr group."""

from __future__ import annotations

import re

_PART = {
    r"sequence/(text|token)_start": ("sequence_edge",),
    r"sequence/\w+": ("sequence",),
    r"sequence/embedding/values": ("sequence", "embedding_channel"),
    r"sequence/embedding/scale": ("sequence", "embedding_group"),
    r"text/utf8": ("byte",),
    r"token/\w+": ("token",),
    r"view\d+/mask/start": ("sequence_edge",),
    r"view\d+/mask/\w+": ("masked_word",),
    r"view\d+/logits/start": ("token_edge",),
    r"view\d+/logits/counts": ("draw",),
    r"view\d+/logits/values": ("token", "head_channel"),
    r"view\d+/logits/(logprobs|ids)": ("token", "kept"),
    r"view\d+/logits/\w+": ("token",),
    r"view\d+/hidden/[^/]+/values": ("token", "channel"),
    r"view\d+/hidden/[^/]+/scale": ("token", "group"),
    r"view\d+/attention/[^/]+/values": ("token_pair",),
    r"view\d+/classes/values": ("sequence", "class"),
    r"view\d+/tags/values": ("token", "tag"),
}
_OUTSIDE = {
    r"manifest": ("byte",),
    r"index/first": ("part_edge",),
    r"index/\d+/counts": ("part", "count"),
    r"index/\d+/lengths": ("sequence",),
    r"index/\d+/(sha256|zarr_json)": ("part", "digest_byte"),
    r"calibration/hidden/[^/]+/\w+": ("channel",),
    r"calibration/words/text": ("byte",),
    r"calibration/words/count": ("word",),
    r"teacher/head/\w+": ("vocabulary", "head_channel"),
    r"teacher/mixed-vocab/embeddings": ("piece", "student_channel"),
}
_NAMES = [(re.compile(path), names) for path, names in (_PART | _OUTSIDE).items()]


def dimension_names(path: str, dimensions: int) -> tuple[str, ...]:
    """Names of the dimensions of the array at `path` in the store, or in its part (FORMAT.md,
    section 6).

    Arrays of one group give one name to dimensions of one length only: xarray asks for that. Files
    and weights share no length, so their dimensions are named after the array: `leaf:0`, `leaf:1`.
    """
    if path.endswith("/logits/ids") and dimensions == 1:
        return ("draw",)  # of tier `sample`; that of `topk` is [N, K]
    for pattern, names in _NAMES:
        if len(names) >= dimensions and pattern.fullmatch(path):
            return names[:dimensions]
    leaf = path.rpartition("/")[2]
    return tuple(f"{leaf}:{axis}" for axis in range(dimensions))
