"""A pool: the blocks that a stream mixes at once, read into buffers that are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from store.errors import StoreError
from store.format.layout import EMBEDDING
from store.read.part import PartReader
from store.read.part_index import PartIndex
from store.read.reading_check import ReadingCheck
from support.arrays import Array, begins, ranges, starts

FEW_TOKENS = 65_536
AT_ONCE = 32  # reads over a network


class Buffers:
    """Named arrays that grow and are used again: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of this shape; it still holds what was there before."""
        held = self._arrays.get(name)
        if held is None or held.dtype != dtype or len(held) < shape[0]:
            held = np.empty((shape[0] + shape[0] // 8, *shape[1:]), dtype)
            self._arrays[name] = held
        return held[: shape[0]]


def _in_order(index: PartIndex, blocks: Array) -> tuple[list[tuple[int, int]], Array, Array]:
    """Sort blocks as the store has them, and join neighbours within a part.

    Returns the joined runs begin..end, the numbers of their sequences, and the places of each given
    block's sequences among them, block after block.
    """
    sizes = blocks[:, 1] - blocks[:, 0]
    order = np.argsort(blocks[:, 0], kind="stable")
    begin, end = blocks[order].T
    parts = index.part_of(begin)
    first = np.flatnonzero(np.append(True, (begin[1:] != end[:-1]) | (parts[1:] != parts[:-1])))
    last = np.append(first[1:], len(begin)) - 1
    runs = list(zip(begin[first].tolist(), end[last].tolist(), strict=True))
    place = np.empty(len(blocks), np.int64)
    place[order] = begins(sizes[order])
    return runs, ranges(begin, end - begin), ranges(place, sizes)


class _Ragged(NamedTuple):
    """Of the sequences of a run: documents, masked spans, and how many and which ids were drawn."""

    document: Array
    span_sizes: Array
    spans: Array
    draws: tuple[Array, Array, Array] | None


class Pool:
    """The wanted arrays of some blocks, flat, as stored (not decoded).

    Sequences lie in the order of the store, so that neighbouring blocks are read at once; `place`
    [n] maps the order of the given blocks to them.
    """

    def __init__(self, parts: PartIndex, blocks: Array, view: int, kinds: tuple[str, ...]) -> None:
        features = parts.features
        self._index, self.features, self.view = parts, features, view
        self._runs, self.index, self.place = _in_order(parts, blocks)
        self.lengths = np.concatenate([parts.lengths(begin, end) for begin, end in self._runs])
        self.token_start, self.square_start = starts(self.lengths), starts(self.lengths**2)
        self._sequence_start = np.arange(len(self.lengths) + 1)
        self.hidden = features.hidden if "hidden" in kinds else ()
        self.attention = features.attention if "attention" in kinds else ()
        self.logits = features.logits if "logits" in kinds else None
        self._specs = parts.specs()
        groups = [f"view{view}/hidden/{name}/" for name in self.hidden]
        groups += [f"view{view}/logits/"] if self.logits else []
        groups += [f"view{view}/tags/"] if "task" in kinds else []
        self._token_names = [
            name for name, spec in self._specs.items()
            if spec.per_token and name.startswith(("token/", *groups))
        ]  # fmt: skip
        self._map_names = [f"view{view}/attention/{name}/values" for name in self.attention]
        ragged = [f"view{view}/mask/"] if view else []
        ragged += [f"view{view}/logits/"] if self.logits and self.logits.tier == "sample" else []
        self._ragged_names = [
            name for name in self._specs
            if name.startswith(tuple(ragged)) and name not in self._token_names
        ]  # fmt: skip
        wanted = ["sequence/label", *[f"view{view}/classes/values"] * ("task" in kinds)]
        self._sequence_names = [name for name in wanted if name in self._specs]
        if "embedding" in kinds:
            self._sequence_names += [n for n in self._specs if n.startswith(f"{EMBEDDING}/")]
        self.token: dict[str, Array] = {}
        self.maps: dict[str, Array] = {}
        self.sequence: dict[str, Array] = {}

    @cached_property
    def _parts(self) -> list[tuple[PartReader, int, int]]:
        """For each run its part, held open, and begin..end within the part."""
        found = [(*self._index.locate(begin), end - begin) for begin, end in self._runs]
        return [(part, first, first + size) for part, first, size in found]

    def _pieces(self) -> Iterator[tuple[PartReader, str, slice, slice]]:
        """List what to read: part, array, its rows there, and the rows of the pool."""
        done = 0
        for part, first, last in self._parts:
            after = done + last - first
            for start, edges, names in (
                (part.token_start, self.token_start, self._token_names),
                (part.square_start, self.square_start, self._map_names),
                (part.sequence_start, self._sequence_start, self._sequence_names),
            ):
                rows = slice(int(start[first]), int(start[last]))
                place = slice(int(edges[done]), int(edges[after]))
                for name in names:
                    yield part, name, rows, place
            done = after

    @cached_property
    def nbytes(self) -> int:
        """Bytes of what `read` reads, unpacked."""
        sizes = dict.fromkeys(self._token_names, self.token_start[-1])
        sizes |= dict.fromkeys(self._map_names, self.square_start[-1])
        return sum(
            int(rows) * self._specs[name].dtype.itemsize * prod(self._specs[name].shape[1:])
            for name, rows in sizes.items()
        )

    def prefetch(self) -> None:
        """Let the disk or the network begin: `read` follows soon. Raises Unreachable."""
        if self._index.remote:
            self._open()
        elif self.token_start[-1] < FEW_TOKENS:
            return  # to ask would take longer than to wait
        with suppress(StoreError):  # reading says what is wrong, when it is its turn
            for part, name, rows, _ in self._pieces():
                part.array(name).prefetch(rows.start, rows.stop)

    def _open(self) -> None:
        """Open all arrays that are read, many at once; those that tell where things lie first."""
        names = [
            "sequence/document", *self._ragged_names, *self._token_names, *self._map_names,
            *self._sequence_names,
        ]  # fmt: skip
        parts = dict.fromkeys(part for part, _, _ in self._parts)

        def opened(wanted: tuple[str, PartReader]) -> None:
            with suppress(StoreError):
                wanted[1].array(wanted[0])

        with ThreadPoolExecutor(AT_ONCE, "open-at-once") as readers:
            for some in (["sequence/token_start"], names):
                list(readers.map(opened, product(some, parts)))

    def check(self, check: ReadingCheck) -> None:
        """Begin to check the arrays of this pool, whole, in every part that it reads."""
        here = f"view{self.view}"
        groups = ("sequence/", "text/", f"{here}/mask/", *[f"{here}/logits/"] * bool(self.logits))
        names = {*self._token_names, *self._map_names, *self._sequence_names}
        names |= {name for name in self._specs if name.startswith(groups)}
        for part, _, _ in self._parts:
            check.begin(part, sorted(names))

    def read(self, buffers: Buffers) -> None:
        """Read all arrays into the buffers, over a network some at once."""
        if not self._index.remote:
            self._read(buffers, map)
            return
        with ThreadPoolExecutor(AT_ONCE, "read-at-once") as readers:
            # What tells where things lie in a part comes first, of all parts at once.
            list(readers.map(lambda run: run[0].token_start, self._parts))
            self._read(buffers, readers.map)

    def _read(self, buffers: Buffers, each: Callable[..., Iterable[Any]]) -> None:
        def take(names: list[str], start: Array) -> dict[str, Array]:
            shapes = {name: (int(start[-1]), *self._specs[name].shape[1:]) for name in names}
            return {
                name: buffers.get(name, shapes[name], self._specs[name].dtype) for name in names
            }

        pieces = list(self._pieces())  # what parts hold is as long as was said: before room is made
        self.token = take(self._token_names, self.token_start)
        self.maps = take(self._map_names, self.square_start)
        self.sequence = take(self._sequence_names, self._sequence_start)
        arrays = self.token | self.maps | self.sequence

        def read(piece: tuple[PartReader, str, slice, slice]) -> None:
            part, name, rows, place = piece
            part.array(name).read_into(rows.start, rows.stop, arrays[name][place])

        for _ in each(read, pieces):
            pass
        self._gather_ragged(list(each(self._ragged, self._parts)))

    def _ragged(self, run: tuple[PartReader, int, int]) -> _Ragged:
        """Read what is not flat of a run."""
        part, first, last = run
        edges, masked = part.spans(self.view, first, last)
        draws = None
        if self.logits and self.logits.tier == "sample":
            tokens = int(part.token_start[first]), int(part.token_start[last])
            draws = part.draws(self.view, *tokens)
        return _Ragged(part.document[first:last], np.diff(edges), masked, draws)

    def _gather_ragged(self, runs: list[_Ragged]) -> None:
        documents, span_sizes, spans = zip(*(run[:3] for run in runs), strict=True)
        draws = [run.draws for run in runs if run.draws is not None]
        self.document, self.spans = np.concatenate(documents), np.concatenate(spans)
        self.span_start = starts(np.concatenate(span_sizes))
        self.draws: dict[str, Array] = {}
        self.draw_start: Array | None = None
        if draws:
            sizes, ids, counts = (np.concatenate(pieces) for pieces in zip(*draws, strict=True))
            self.draw_start, self.draws = starts(sizes), {"ids": ids, "counts": counts}

    @cached_property
    def texts(self) -> list[str]:
        """Texts of all sequences, read when first asked for: not every training needs them."""
        found: list[str] = []
        for part, first, last in self._parts:
            found += part.texts(first, last)
        return found
