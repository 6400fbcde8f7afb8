"""The arrays of a part: names, dtypes, shapes, compression and dimension names.

Features and Counts determine all but the dimension names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.codecs.codec import DENSE, FAST, CodecArray, Packing
from teachonce.store.format.features import (
    ACTIONS,
    CONTEXT,
    LEARN,
    MESSAGES,
    ROLES,
    UNLISTED_ROLE,
    Features,
    TaskSpec,
)
from teachonce.support.arrays import Array
from teachonce.support.parsing import whole_number

FORMAT = "teachonce"
VERSIONS = (1, 2)
"""Version 1 lists the parts in the manifest. Version 2, for many parts, has an index."""
# Times the longest row, 2^20 numbers of 4 bytes, this is 2^62: no size overflows int64.
MAX_COUNT = 2**40
MAX_PART = 10**9
EMBEDDING = "sequence/embedding"
"""Group of a part that has the vectors of its sequences."""


def part_number(name: str) -> int | None:
    """Return the number of the part with this name in the group `parts`; None if no part can have
    this name, such as "01"."""
    number = whole_number(name, len(str(MAX_PART)))
    return number if str(number) == name else None


def part_numbers_in(names: Iterable[str]) -> set[int]:
    """Return the numbers of the parts among the names in the group `parts`, other names left
    out."""
    return {number for number in map(part_number, names) if number is not None}


def part_of(path: str) -> int | None:
    """Return the number of the part that contains a path; None outside the parts."""
    top, _, rest = path.partition("/")
    return part_number(rest.partition("/")[0]) if top == "parts" else None


def groups_above(path: str) -> list[str]:
    """List the groups that contain an array or group, from the top, without the root."""
    segments = path.split("/")
    return ["/".join(segments[:depth]) for depth in range(1, len(segments))]


@dataclass(frozen=True)
class ArraySpec:
    """Describes the dtype, shape and compression of one stored array.

    Arrays `per_token` have chunks of a number of tokens, all others of a number of bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    packing: Packing | None = FAST
    per_token: bool = False

    @property
    def nbytes(self) -> int:
        """Return the uncompressed size of the array in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def rows(self, token_rows: int, chunk_bytes: int) -> int:
        """Return the number of rows in a chunk: `token_rows` if there is a row for each token, else
        the largest power of two whose rows fit into `chunk_bytes`."""
        # A chunk has at least one row, and no more rows than the array (FORMAT.md, section 3).
        length = max(1, self.shape[0])
        if self.per_token:
            return min(token_rows, length)
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        fitting = max(1, chunk_bytes // max(1, row))
        return min(1 << (fitting.bit_length() - 1), length)


@dataclass(frozen=True)
class Counts:
    """Holds the sizes of a part.

    squares: the sum of L^2 over its sequences of length L. spans: the number of masked words in
        each view; of view 0, the number of messages of chats. draws: the number of sampled ids, or
        of distinct ids of ranked logits, in each view.
    """

    sequences: int
    tokens: int
    squares: int
    text_bytes: int
    spans: tuple[int, ...]
    draws: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"spans": list(self.spans), "draws": list(self.draws)}

    def flat(self) -> list[int]:
        """List all sizes, [4 + 2 * views], in the order of the fields."""
        sizes = [self.sequences, self.tokens, self.squares, self.text_bytes]
        return [*sizes, *self.spans, *self.draws]

    @staticmethod
    def of_flat(sizes: Sequence[int]) -> Counts:
        """Make counts from the list of `flat`."""
        middle, (sequences, tokens, squares, text) = (4 + len(sizes)) // 2, sizes[:4]
        spans, draws = tuple(sizes[4:middle]), tuple(sizes[middle:])
        return Counts(sequences, tokens, squares, text, spans, draws)

    @staticmethod
    def from_json(value: object, features: Features, where: str, most: int = MAX_COUNT) -> Counts:
        """Check and read the counts of a part, each at most `most`. Raises StoreError, which names
        `where`."""
        if not isinstance(value, Mapping):
            raise StoreError(f"{where}: counts must be a JSON object; the store is damaged")

        keys = ("sequences", "tokens", "squares", "text_bytes")
        sizes: list[tuple[str, Any]] = [(key, value.get(key)) for key in keys]
        for key in ("spans", "draws"):
            numbers = value.get(key)
            if not isinstance(numbers, list) or len(numbers) != features.views:
                raise StoreError(
                    f"{where}: {key} must have one number for each view; the store is damaged"
                )
            sizes += [(key, number) for number in numbers]
        for key, number in sizes:
            least = 1 if key == "sequences" else 0
            # `type`, not isinstance: true is an int in Python.
            if type(number) is not int or not least <= number <= most:
                raise StoreError(f"{where}: {key} is {number!r}; the store is damaged")
        return Counts.of_flat([number for _, number in sizes])


def count_dtype(draws: int) -> np.dtype[Any]:
    """Return the dtype of the counts of `draws` random draws."""
    # `LogitsSpec` allows at most 65535 draws, so uint16 holds the count of an id drawn every time.
    return np.dtype(np.uint8 if draws <= 255 else np.uint16)


def _token(dtype: Any, tokens: int, *row: int, packing: Packing | None = FAST) -> ArraySpec:
    return ArraySpec(np.dtype(dtype), (tokens, *row), packing, per_token=True)


def _flat(dtype: Any, length: int, packing: Packing | None = FAST) -> ArraySpec:
    return ArraySpec(np.dtype(dtype), (length,), packing)


def _coded(array: CodecArray, tokens: int) -> ArraySpec:
    return _token(array.dtype, tokens, *array.row, packing=array.packing)


def _logits(features: Features, tokens: int, draws: int) -> dict[str, ArraySpec]:
    """List the arrays of the store's tier of logits."""
    if features.logits is None:
        return {}
    tier, size, level = features.logits.tier, features.logits.size, features.level
    partition = {"log_partition": _token(np.float32, tokens)}
    if features.logits.observed:
        partition["observed"] = _coded(level.rest.arrays(())["values"], tokens)
    if tier == "topk":
        ids = {"ids": _token(np.uint32, tokens, size, packing=level.ids)}
        ranked = {
            "places": _token(np.uint32, tokens, size, packing=level.places),
            "distinct": _flat(np.uint32, draws, level.places),
        }
        return (
            (ranked if features.logits.ranked else ids)
            | {
                "logprobs": _coded(level.logprobs.arrays((size,))["values"], tokens),
                "rest": _coded(level.rest.arrays(())["values"], tokens),
            }
            | partition
        )
    if tier == "sample":
        return {
            "start": _flat(np.int64, tokens + 1),
            "ids": _flat(np.uint32, draws, level.ids),
            "counts": _flat(count_dtype(size), draws, level.ids),
        } | partition
    arrays = level.head.arrays((size,))
    return {name: _coded(array, tokens) for name, array in arrays.items()} | partition


def _task_outputs(task: TaskSpec, counts: Counts) -> ArraySpec:
    """Return the spec of the teacher's logits: [n, C] for classes, [N, C] for tags."""
    if task.kind == "tagging":
        return _token(np.float32, counts.tokens, len(task.labels))
    return ArraySpec(np.dtype(np.float32), (counts.sequences, len(task.labels)))


@dataclass(frozen=True)
class SpanKind:
    """Describes spans of the texts: masked words, or the messages of chats.

    group: the group of their arrays. plural: their name in messages. number: name of the array with
    a number for each span (action or role). numbers: the values that this array may have. empty:
    whether a span may have no character.
    """

    group: str
    plural: str
    number: str
    numbers: tuple[int, ...]
    empty: bool = False

    def too_short(self, begin: Array, end: Array) -> Array:
        """Return which spans have too few characters: bool [M]."""
        return np.asarray(begin > end if self.empty else begin >= end)


def span_kind(view: int) -> SpanKind:
    """Return the spans that `Counts.spans[view]` counts: the masked words of a view, or for view 0,
    which has none, the messages of chats."""
    if view:
        return SpanKind(f"view{view}/mask", "masked words", "action", tuple(range(ACTIONS)))
    return SpanKind(MESSAGES, "messages", "role", (*range(len(ROLES)), UNLISTED_ROLE), empty=True)


def _spans(kind: SpanKind, counts: Counts, view: int) -> dict[str, ArraySpec]:
    spans = counts.spans[view]
    dtypes = {"begin": np.int32, "end": np.int32, kind.number: np.uint8}
    start = {f"{kind.group}/start": _flat(np.int64, counts.sequences + 1)}
    return start | {f"{kind.group}/{name}": _flat(dtype, spans) for name, dtype in dtypes.items()}


def part_arrays(features: Features, counts: Counts) -> dict[str, ArraySpec]:
    """List the arrays of a part by path inside the part, in the order in which they are written."""
    sequences, tokens = counts.sequences, counts.tokens
    # HDF5 lays arrays out in this order, and equal parts must have equal bytes.
    arrays = {
        "sequence/document": _flat(np.int64, sequences),
        "sequence/document_begin": _flat(np.int64, sequences),
        "sequence/hard_cut": _flat(np.bool_, sequences),
        "sequence/text_start": _flat(np.int64, sequences + 1),
        "sequence/token_start": _flat(np.int64, sequences + 1),
        "text/utf8": _flat(np.uint8, counts.text_bytes, DENSE),
        "token/id": _token(np.uint32, tokens),
        "token/begin": _token(np.int32, tokens),
        "token/end": _token(np.int32, tokens),
        "token/special": _token(np.bool_, tokens),
    }
    # Only if the features say so: stores without these arrays keep the bytes that they had before
    # the arrays existed.
    if features.context:
        arrays[CONTEXT] = _flat(np.int32, sequences)
    if features.learn:
        arrays[LEARN] = _token(np.bool_, tokens)
    if features.messages:
        arrays |= _spans(span_kind(0), counts, 0)
    if task := features.task:
        gold = _token(np.int32, tokens) if task.kind == "tagging" else _flat(np.int32, sequences)
        arrays[task.gold] = gold
    if vector := features.embedding:
        for name, array in features.level.embedding.arrays((vector.width,)).items():
            arrays[f"{EMBEDDING}/{name}"] = ArraySpec(
                array.dtype, (sequences, *array.row), array.packing
            )
    attention = features.level.attention
    for view in range(features.views):
        prefix = f"view{view}"
        if view:
            arrays |= _spans(span_kind(view), counts, view)
        for name, spec in _logits(features, tokens, counts.draws[view]).items():
            arrays[f"{prefix}/logits/{name}"] = spec
        for hidden in features.hidden:
            for name, array in features.level.hidden.codec.arrays((features.width,)).items():
                arrays[f"{prefix}/hidden/{hidden}/{name}"] = _coded(array, tokens)
        for name in features.attention:
            arrays[f"{prefix}/attention/{name}/values"] = _flat(
                attention.dtype, counts.squares, attention.packing
            )
        if task:
            arrays[f"{prefix}/{task.outputs}/values"] = _task_outputs(task, counts)
    return arrays


def as_read(stored: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Rename the arrays of a part to the names by which `PartReader` reads them: places of ranked
    logits are read as `ids`."""
    places = "/logits/places"
    return {
        f"{name.removesuffix(places)}/logits/ids" if name.endswith(places) else name: spec
        for name, spec in stored.items()
    }


class PartShapes:
    """Computes the names, shapes and dtype names that the manifest must have for any part."""

    def __init__(self, features: Features) -> None:
        # Computed once for a store: calling `part_arrays` for each of thousands of parts takes as
        # long as parsing the manifest.
        self.features, views = features, features.views
        spans = tuple(range(6, 6 + views))
        draws = tuple(range(6 + views, 6 + 2 * views))
        # With these counts `_lengths` is 0, 1, 2, ..., so each array's length is its index there.
        specs = part_arrays(features, Counts(0, 2, 4, 5, spans, draws))
        self._arrays = [
            (name, spec.shape[0], spec.shape[1:], spec.dtype.name) for name, spec in specs.items()
        ]

    @staticmethod
    def _lengths(counts: Counts) -> tuple[int, ...]:
        """Return every length that an array of a part may have."""
        sequences, tokens = counts.sequences, counts.tokens
        edges = (sequences, sequences + 1, tokens, tokens + 1)
        return (*edges, counts.squares, counts.text_bytes, *counts.spans, *counts.draws)

    def of(self, counts: Counts) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and dtype name of every array of a part, as in `part_arrays`."""
        lengths = self._lengths(counts)
        return {name: ((lengths[index], *row), dtype) for name, index, row, dtype in self._arrays}


def teacher_array(values: Array) -> ArraySpec:
    """Return how an array outside the parts (teacher/, calibration/, manifest) is stored."""
    return ArraySpec(values.dtype, values.shape, FAST if values.dtype.itemsize > 1 else None)


# The first pattern that fits wins, so the general pattern of a group follows the particular ones.
_DIMENSIONS = {
    re.compile(path): names
    for path, names in {
        r"sequence/(text|token)_start": ("sequence_edge",),
        r"sequence/\w+": ("sequence",),
        r"sequence/embedding/values": ("sequence", "embedding_channel"),
        r"sequence/embedding/scale": ("sequence", "embedding_group"),
        r"text/utf8": ("byte",),
        r"token/\w+": ("token",),
        r"(view\d+/mask|chat)/start": ("sequence_edge",),
        r"view\d+/mask/\w+": ("masked_word",),
        r"chat/\w+": ("message",),
        r"view\d+/logits/start": ("token_edge",),
        r"view\d+/logits/counts": ("draw",),
        r"view\d+/logits/values": ("token", "head_channel"),
        r"view\d+/logits/(logprobs|ids|places)": ("token", "kept"),
        r"view\d+/logits/distinct": ("distinct_id",),
        r"view\d+/logits/\w+": ("token",),
        r"view\d+/hidden/[^/]+/values": ("token", "channel"),
        r"view\d+/hidden/[^/]+/scale": ("token", "group"),
        r"view\d+/attention/[^/]+/values": ("token_pair",),
        r"view\d+/classes/values": ("sequence", "class"),
        r"view\d+/tags/values": ("token", "tag"),
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
    }.items()
}


def dimension_names(path: str, dimensions: int) -> tuple[str, ...]:
    """Return the dimension names of the array at `path` in the store, or in its part.

    See FORMAT.md, section 6. Arrays that are not listed there get names of their own: `leaf:0`,
    `leaf:1`.
    """
    # xarray requires dimensions of the same name in a group to have the same length. Files and
    # weights share no length.
    if path.endswith("/logits/ids") and dimensions == 1:
        return ("draw",)  # tier `sample`; ids of `topk` are [N, K]
    for pattern, names in _DIMENSIONS.items():
        # A codec of another package may store an array with more dimensions than this table has
        # names.
        if len(names) >= dimensions and pattern.fullmatch(path):
            return names[:dimensions]
    leaf = path.rpartition("/")[2]
    return tuple(f"{leaf}:{axis}" for axis in range(dimensions))
