"""Read a store as an Arrow table: a row for each sequence, a column for each feature.

Parquet files and `datasets.Dataset` are written from its batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from teachonce.store.errors import StoreError
from teachonce.store.format.features import CONTEXT, LEARN, ROLES, UNLISTED_ROLE
from teachonce.store.format.sequences import split_pair
from teachonce.store.read.part_index import PartIndex
from teachonce.store.read.stream import Batch, Streamer
from teachonce.store.read.stream_order import StreamOrder
from teachonce.support.arrays import Array, starts
from teachonce.support.errors import suggest

FLOATS = ("float32", "float16")
BATCH_BYTES = 2**24  # of the rows of one batch
# A quarter of what a training reads at once: nothing is shuffled here, so more would only take
# memory.
POOL_BLOCKS = 16  # of 4,096 tokens, which a stream reads at once
LEAST_TOKENS, MOST_TOKENS = 256, 2**16  # of a batch
LABELS = 20  # that the description of a column lists
METADATA = b"teachonce"  # key of the schema's metadata about the store

Per = Literal["sequence", "token", "masked word", "message", "draw", "pair of tokens"]
Values = Callable[[Batch], Any]


@dataclass(frozen=True)
class Column:
    """Describes one column of the table.

    per: what one value belongs to: a token, a sequence, ...
    description: the meaning of a cell, for people.
    values: a function that returns the values of a batch: an array with one number, or `width`
        numbers, for each token, sequence, ...; a list if `dtype` is str. Masked elements of the
        array become null cells.
    view, feature: the view to stream, and the feature that the stream must read.
    """

    name: str
    per: Per
    dtype: Any
    description: str
    values: Values
    width: int | None = None
    view: int = 0
    feature: str | None = None

    @property
    def type(self) -> Any:
        """Return the Arrow type of a cell."""
        cell = pa.string() if self.dtype is str else pa.from_numpy_dtype(self.dtype)
        cell = cell if self.width is None else pa.list_(cell, self.width)
        if self.per == "sequence":
            return cell
        return pa.list_(pa.list_(cell) if self.per in ("draw", "pair of tokens") else cell)

    def cells(self, batch: Batch) -> Any:
        """Return the Arrow array of a batch's B cells."""
        flat = self._flat(self.values(batch))
        if self.per == "masked word":
            return _lists(batch.spans_start, flat)
        if self.per == "message":
            assert batch.messages is not None
            return _lists(batch.messages[0], flat)
        if self.per == "draw":
            assert batch.logits is not None
            flat = _lists(batch.logits.start, flat)
        if self.per == "pair of tokens":
            lengths = np.diff(batch.start)
            flat = _lists(starts(np.repeat(lengths, lengths)), flat)
        return flat if self.per == "sequence" else _lists(batch.start, flat)

    def _flat(self, values: Any) -> Any:
        if self.dtype is str:
            return pa.array(values, pa.string())
        if isinstance(values, np.ma.MaskedArray):
            return pa.array(values.astype(self.dtype).data, mask=values.mask)
        with np.errstate(over="ignore"):
            copied = np.array(values, self.dtype)  # a copy: the next batch reuses the memory
        if copied.dtype == np.float16 and not np.array_equal(np.isinf(copied), np.isinf(values)):
            raise StoreError(
                f"column {self.name}: has numbers that float16 cannot hold; use float32"
            )
        numbers = pa.array(copied.reshape(-1))
        if self.width is None:
            return numbers
        return pa.FixedSizeListArray.from_arrays(numbers, self.width)

    def bytes(self, tokens: int) -> int:
        """Estimate the size in bytes of a cell for a sequence of `tokens` tokens."""
        size = 8 if self.dtype is str else np.dtype(self.dtype).itemsize
        counts = {"sequence": 1, "pair of tokens": tokens**2}
        return size * (self.width or 1) * counts.get(self.per, tokens)


def _lists(start: Array, values: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array(start, pa.int32()), values)


class StoreTable:
    """Yields the rows of a store, in its order, in batches that fit into memory.

    about: JSON for the schema's metadata under the key `teachonce`.
    columns: names of the columns, in order; None for all.
    floats: float32 or float16, the type of states, maps, vectors and inputs of the head.

    `schema` is the Arrow schema; its metadata describe each column. Raises StoreError for an
    unknown column or type.
    """

    def __init__(
        self,
        index: PartIndex,
        streamer: Streamer,
        about: Mapping[str, Any],
        columns: Sequence[str] | None = None,
        floats: str = "float32",
    ) -> None:
        if floats not in FLOATS:
            raise StoreError(f"floats: expected {' or '.join(FLOATS)}, got {floats!r}")
        self._index, self._streamer = index, streamer
        by_name = {column.name: column for column in _columns(index, floats)}
        self.columns = list(by_name) if columns is None else list(columns)
        for name in self.columns:
            if name not in by_name:
                raise StoreError(
                    f"{index.path}: no column {name!r}; {suggest(name, by_name)}it has"
                    f" {', '.join(by_name)}"
                )
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise StoreError(
                f"columns: expected at least one, and each once, got {', '.join(self.columns)}"
            )
        self._columns = [by_name[name] for name in self.columns]
        fields = [
            pa.field(column.name, column.type, metadata={b"description": column.description})
            for column in self._columns
        ]
        metadata = json.dumps({**about, "floats": floats}, sort_keys=True).encode()
        self.schema = pa.schema(fields, {METADATA: metadata})

    def blocks(self) -> Array:
        """Return int64 [n, 2]: begin and end of each block of consecutive rows. No block crosses a
        part of the store."""
        return self._index.blocks(4096)

    def batches(self, blocks: Array | None = None) -> Iterator[Any]:
        """Yield `pyarrow.RecordBatch`es of all rows, or of the rows of `blocks`, in order.

        For a store on a disk, arrays are compared with their checksums; a difference raises
        StoreError.
        """
        features = dict[int, set[str]]()
        for column in self._columns:
            read = features.setdefault(column.view, set())
            read |= {column.feature} if column.feature else set()
        rows = self.blocks() if blocks is None else self._index.check_blocks(blocks)
        streams = [self._stream(view, read, rows) for view, read in features.items()]
        for batches in zip(*streams, strict=True):  # all streams yield the same sequences
            of_view = dict(zip(features, batches, strict=True))
            cells = [column.cells(of_view[column.view]) for column in self._columns]
            yield pa.RecordBatch.from_arrays(cells, schema=self.schema)

    def _stream(self, view: int, features: set[str], blocks: Array) -> Iterator[Batch]:
        order = StreamOrder(
            seed=0,  # draws nothing: the rows are not shuffled
            epoch=0,
            batch_tokens=self._batch_tokens(),
            blocks=blocks,
            pool_blocks=POOL_BLOCKS,
            shuffle=False,
            view=view,
            features=tuple(features),
        )
        return self._streamer.stream(order, check=True)

    def _batch_tokens(self) -> int:
        # Maps grow with the square of the length, so a longest sequence determines the size.
        longest = self._index.features.max_length
        row_bytes = sum(column.bytes(longest) for column in self._columns)
        return min(MOST_TOKENS, max(LEAST_TOKENS, BATCH_BYTES * longest // row_bytes))


def _columns(index: PartIndex, floats: str) -> Iterator[Column]:
    yield from _text_columns(index)
    yield from _gold_columns(index)
    if vector := index.features.embedding:
        yield Column(
            "embedding",
            "sequence",
            floats,
            "the teacher's vector of the text",
            lambda batch: batch.embedding,
            vector.width,
            feature="embedding",
        )
    for view in range(index.features.views):
        yield from _view_columns(index, floats, view)


def _text_columns(index: PartIndex) -> Iterator[Column]:
    of_sequence: list[tuple[str, Any, str, Values]] = [
        ("index", "int64", "number of the sequence", lambda batch: batch.index),
        ("document", "int64", "number of its document", lambda batch: batch.document),
        ("document_begin", "int64", "character of the document where it begins",
         partial(_stored, index, "document_begin")),
        ("hard_cut", "bool", "whether it begins inside a word",
         partial(_stored, index, "hard_cut")),
    ]  # fmt: skip
    if index.features.context:
        text = "number of its first tokens that only give context"
        of_sequence.append(("context", "int32", text, lambda batch: batch.stored[CONTEXT]))
    of_sequence.append(("text", str, "its text", lambda batch: batch.texts))
    if index.features.separator is not None:
        for number, name in enumerate(("text_a", "text_b")):
            values: Values = partial(_one_of_pair, index, number)
            of_sequence.append((name, str, "one text of the pair", values))
    of_token: list[tuple[str, Any, str, Values]] = [
        ("token_ids", "int32", "the teacher's tokens", lambda batch: batch.token_ids),
        ("begin", "int32", "character of the text where each token begins, 0 of a special one",
         lambda batch: batch.offsets[:, 0]),
        ("end", "int32", "character behind each token, 0 of a special one",
         lambda batch: batch.offsets[:, 1]),
        ("special", "bool", "whether each token is a special one", lambda batch: batch.special),
    ]  # fmt: skip
    if index.features.learn:
        text = "whether students are trained on each token"
        of_token.append(("learn", "bool", text, lambda batch: batch.stored[LEARN]))
    if index.features.messages:
        roles = ", ".join(f"{number} {role}" for number, role in enumerate(ROLES))
        for column, (name, text) in enumerate({
            "begin": "character of the text where the content of each message begins",
            "end": "character behind the content of each message",
            "role": f"role of each message: {roles}, {UNLISTED_ROLE} any other",
        }.items()):  # fmt: skip
            values = partial(_messages, column)
            yield Column(f"message_{name}", "message", "int32", text, values)
    for name, dtype, description, values in of_sequence:
        yield Column(name, "sequence", dtype, description, values)
    for name, dtype, description, values in of_token:
        yield Column(name, "token", dtype, description, values)


def _stored(index: PartIndex, name: str, batch: Batch) -> Array:
    """Read an array that batches do not have, for the sequences of a batch."""
    pieces = []
    # An unshuffled batch has consecutive sequences, but for the ends of blocks.
    for run in np.split(batch.index, np.flatnonzero(np.diff(batch.index) != 1) + 1):
        first, stop = int(run[0]), int(run[-1]) + 1
        # A run may contain the end of one part and the start of the next.
        while first < stop:
            part, position = index.locate(first)
            end = min(part.part.counts.sequences, position + stop - first)
            pieces.append(part.read(f"sequence/{name}", position, end))
            first += end - position
    return np.concatenate(pieces)


def _one_of_pair(index: PartIndex, number: int, batch: Batch) -> list[str]:
    separator = index.features.separator
    return [split_pair(text, separator, index.path)[number] for text in batch.texts]


def _gold_columns(index: PartIndex) -> Iterator[Column]:
    if (task := index.features.task) is None:
        return
    names = f"; labels are {', '.join(task.labels[:LABELS])}"
    if task.kind == "tagging":
        description = f"gold tag of each token, -1 where there is none{names}"
        yield Column("tags", "token", "int32", description, lambda batch: batch.tags)
        return

    def labels(batch: Batch) -> Any:
        gold = np.array(batch.labels)
        return np.ma.masked_array(gold, gold < 0)

    yield Column("label", "sequence", "int32", f"gold label, or null{names}", labels)


def _view_columns(index: PartIndex, floats: str, view: int) -> Iterator[Column]:
    """List the columns of a view; names of a masked view begin with its number."""
    features, prefix = index.features, f"view{view}_" if view else ""
    for number, name in enumerate(("begin", "end", "action") if view else ()):
        text = "characters of masked words, and 0 masked, 1 replaced at random, 2 unchanged"
        name, spans = f"{prefix}masked_{name}", partial(_spans, number)
        yield Column(name, "masked word", "int32", text, spans, view=view)
    for state in features.hidden:
        name, text = f"{prefix}hidden_{state}", f"hidden state {state} of each token"
        states = partial(_states, state)
        yield Column(name, "token", floats, text, states, features.width, view, "hidden")
    for array, per, dtype, text, width in _logits_columns(index, floats):
        name, logits = f"{prefix}logits_{array}", attrgetter(f"logits.{array}")
        yield Column(name, per, dtype, text, logits, width, view, "logits")
    for attention in features.attention:
        text = f"attention map {attention}: the attention of each token (row) to each token"
        name, maps = f"{prefix}attention_{attention}", partial(_map, attention)
        yield Column(name, "pair of tokens", floats, text, maps, None, view, "attention")
    if task := features.task:
        unit, per = ("tag", "token") if task.kind == "tagging" else ("class", "sequence")
        text, logits = f"the teacher's logits of each {unit}", attrgetter(f"{unit}_logits")
        name, width = f"{prefix}{unit}_logits", len(task.labels)
        yield Column(name, per, "float32", text, logits, width, view, "task")


def _logits_columns(
    index: PartIndex, floats: str
) -> Iterator[tuple[str, Per, str, str, int | None]]:
    """Yield name, per, dtype, description and width of the columns of the tier of logits; the width
    is None for single numbers."""
    if (spec := index.features.logits) is None:
        return
    following = " of the token after" if spec.next_token else ""
    if spec.tier == "topk":
        yield "ids", "token", "int32", f"the best ids{following}, best first", spec.size
        yield "logprobs", "token", "float32", "their log-probabilities", spec.size
        yield "rest", "token", "float32", "log of the probability of all other ids", None
    elif spec.tier == "sample":
        yield "ids", "draw", "int32", f"the ids{following} that were drawn", None
        yield "counts", "draw", "int32", f"how often, of {spec.size} draws", None
    else:
        yield "values", "token", floats, "input of the teacher's head", spec.size
    if spec.observed:
        text = "log-probability of the token after; -inf in the last row"
        yield "observed", "token", "float32", text, None
    yield "log_partition", "token", "float32", "log of the sum of exp of the logits", None


def _spans(column: int, batch: Batch) -> Array:
    return batch.spans[:, column]


def _messages(column: int, batch: Batch) -> Array:
    assert batch.messages is not None
    return batch.messages[1][:, column]


def _states(name: str, batch: Batch) -> Array:
    return batch.hidden[name].states()


def _map(name: str, batch: Batch) -> Array:
    return batch.attention[name]
