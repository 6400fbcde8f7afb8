"""A pool: the blocks that a stream shuffles together, read into reusable buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from teachonce.store.errors import NO_NUMBERS, StoreError
from teachonce.store.format.features import CONTEXT, Calibration
from teachonce.store.format.layout import EMBEDDING, span_kind
from teachonce.store.format.value_laws import Violation, find_violation
from teachonce.store.read.part import PartReader
from teachonce.store.read.part_index import PartIndex
from teachonce.store.read.part_laws import ReadingCheck, line_of, line_of_token
from teachonce.support.arrays import Array, begins, ranges, starts

# From a disk, smaller pools are not prefetched: requesting 64 tiny parts takes longer than reading.
FEW_TOKENS = 65_536
# The first pool of a store with logits, states and maps has about 120 arrays in 8 parts; with 64
# threads, opening them took two round trips.
AT_ONCE = 256  # threads that wait for the network
DECODERS = 2  # threads that decode: more would only wait for one another
RAGGED_BYTES = 64  # upper estimate for the masked words and draws of a token


class Buffers:
    """Holds named arrays that grow and are reused, because allocating fresh memory takes longer
    than the copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of this shape with uninitialised content."""
        array = self._arrays.get(name)
        # The shape of a row is not compared: in one store it is the same for each name.
        if array is None or array.dtype != dtype or len(array) < shape[0]:
            # A copy into fresh memory runs at 2.5 GB/s, into used memory at 8. The eighth saves
            # growing again for each slightly larger batch.
            array = np.empty((shape[0] + shape[0] // 8, *shape[1:]), dtype)
            self._arrays[name] = array
        return array[: shape[0]]


def _in_order(index: PartIndex, blocks: Array) -> tuple[list[tuple[int, int]], Array, Array]:
    """Sort blocks [m, 2] (sequences begin..end) by begin; merge adjacent blocks of the same part.

    Returns runs: the merged blocks as (begin, end). numbers [n]: the sequences of all runs, in
    ascending order. place [n]: for each sequence of `blocks`, in the given order, its index in
    `numbers`.
    """
    sizes = blocks[:, 1] - blocks[:, 0]
    order = np.argsort(blocks[:, 0], kind="stable")
    begin, end = blocks[order].T
    parts = index.part_of(begin)
    first = np.flatnonzero(np.append(True, (begin[1:] != end[:-1]) | (parts[1:] != parts[:-1])))
    last = np.append(first[1:], len(begin)) - 1
    runs = list(zip(begin[first].tolist(), end[last].tolist(), strict=True))
    offset = np.empty(len(blocks), np.int64)
    offset[order] = begins(sizes[order])
    return runs, ranges(begin, end - begin), ranges(offset, sizes)


class Excerpt:
    """Describes which of a pool's sequences are read from some of its arrays.

    runs: [m, 2], half-open ranges of positions among the pool's n sequences, which have `lengths`.
    number: [n], the position in the excerpt of each of the pool's sequences.
    sequence_start, token_start, square_start: the first row of each sequence of the excerpt in
        arrays with a row for each sequence, for each token, and in attention maps.
    """

    def __init__(self, runs: Array, lengths: Array) -> None:
        rows = ranges(runs[:, 0], runs[:, 1] - runs[:, 0])
        self.runs, self.number = runs, np.zeros(len(lengths), np.int64)
        self.number[rows] = np.arange(len(rows))
        self.sequence_start = np.arange(len(rows) + 1)
        self.token_start, self.square_start = starts(lengths[rows]), starts(lengths[rows] ** 2)


class Pool:
    """Holds the requested arrays of some blocks, concatenated over sequences, not decoded.

    The pool has its sequences in the order of the store; the blocks may have another order. `place`
    [n]: for each sequence of the blocks, its index in the pool. If `batches` are given, only rows
    of their sequences, and rows in the same chunks, are read (see `excerpt`).
    """

    def __init__(
        self,
        parts: PartIndex,
        blocks: Array,
        view: int,
        kinds: tuple[str, ...],
        batches: list[Array] | None = None,
    ) -> None:
        """Read nothing yet.

        batches: positions, in the order of the blocks, of the sequences that will be requested;
            None for all.
        """
        features = parts.features
        self._index, self.features, self.view = parts, features, view
        # In the order of the store, neighbouring blocks become one run, which is read at once.
        self._runs, self.index, self.place = _in_order(parts, blocks)
        self.lengths = parts.lengths_of(np.array(self._runs))
        self._edges = starts([end - begin for begin, end in self._runs])
        self._start = {False: starts(self.lengths), True: starts(self.lengths**2)}  # True: for maps
        requested = None if batches is None else np.unique(self.place[np.concatenate(batches)])
        # The requested sequences; None if all are requested.
        self._requested = (
            None if requested is None or len(requested) == len(self.lengths) else requested
        )
        self._excerpts = dict[tuple[bool, int], Excerpt]()
        self.hidden = features.hidden if "hidden" in kinds else ()
        self.attention = features.attention if "attention" in kinds else ()
        self.logits = features.logits if "logits" in kinds else None
        self._choose_arrays(kinds)
        self.token: dict[str, Array] = {}
        self.maps: dict[str, Array] = {}
        self.sequence: dict[str, Array] = {}

    def _choose_arrays(self, kinds: tuple[str, ...]) -> None:
        """Choose the arrays to read, by what their rows belong to: tokens, pairs of tokens, masked
        words and draws, sequences."""
        self._specs, view = self._index.specs(), self.view
        groups = [f"view{view}/hidden/{name}/" for name in self.hidden]
        groups += [f"view{view}/logits/"] if self.logits else []
        groups += [f"view{view}/tags/"] if "task" in kinds else []
        self._token_names = [
            name for name, spec in self._specs.items()
            if spec.per_token and name.startswith(("token/", *groups))
        ]  # fmt: skip
        self._map_names = [f"view{view}/attention/{name}/values" for name in self.attention]
        ragged = [f"{span_kind(view).group}/"]
        ragged += [f"view{view}/logits/"] if self.logits and self.logits.tier == "sample" else []
        self._ragged_names = [
            name for name in self._specs
            if name.startswith(tuple(ragged)) and name not in self._token_names
        ]  # fmt: skip
        names = ["sequence/label", CONTEXT, *[f"view{view}/classes/values"] * ("task" in kinds)]
        names += ["sequence/document_begin"] * self.features.messages
        self._sequence_names = [name for name in names if name in self._specs]
        if "embedding" in kinds:
            self._sequence_names += [n for n in self._specs if n.startswith(f"{EMBEDDING}/")]

    def excerpt(self, name: str) -> Excerpt:
        """Return the excerpt of an array that is read.

        It has the requested sequences, and the sequences between them that are decoded in any case.
        """
        if name in self._sequence_names:
            return self._excerpt(False, self._index.grain)
        gap = max(1, self._index.grain // self._row_bytes(name))
        return self._excerpt(name in self._map_names, gap)

    @cached_property
    def ragged(self) -> Excerpt:
        """Return the excerpt of documents, masked words and draws."""
        return self._excerpt(False, self._index.grain // RAGGED_BYTES)

    def _excerpt(self, squares: bool, gap: int) -> Excerpt:
        """Return the excerpt that skips gaps of at least `gap` tokens between requested sequences
        of a part. If `squares`, `gap` is a number of entries of attention maps."""
        if self._requested is None:
            # All sequences are requested, so one excerpt serves all arrays.
            squares, gap = False, 0
        key = squares, gap
        if key not in self._excerpts:
            runs = np.stack([self._edges[:-1], self._edges[1:]], axis=1)
            if self._requested is not None:
                requested, start = self._requested, self._start[squares]
                run = np.searchsorted(self._edges, requested, "right")
                left_out = start[requested[1:]] - start[requested[:-1] + 1] >= gap
                new = np.append(True, left_out | (np.diff(run) > 0))
                runs = np.stack([requested[new], requested[np.append(new[1:], True)] + 1], axis=1)
            self._excerpts[key] = Excerpt(runs, self.lengths)
        return self._excerpts[key]

    @cached_property
    def _parts(self) -> list[tuple[PartReader, int]]:
        """Return for each run its part, which stays open, and the position in the part at which the
        run starts."""
        return [self._index.locate(begin) for begin, _ in self._runs]

    def _located(self, excerpt: Excerpt) -> Iterator[tuple[PartReader, int, int]]:
        """Yield each run of an excerpt as (part, begin, end): sequences begin..end of the part."""
        indices = np.searchsorted(self._edges, excerpt.runs[:, 0], "right") - 1
        shifts = self._edges[indices]
        for index, (begin, end) in zip(
            indices.tolist(), (excerpt.runs - shifts[:, None]).tolist(), strict=True
        ):
            part, first = self._parts[index]
            yield part, first + begin, first + end

    def _pieces(self) -> Iterator[tuple[PartReader, str, slice, slice]]:
        """Yield what `read` reads: a part, the name of an array, the rows in the part, and their
        rows in the pool."""
        names = [*self._token_names, *self._map_names, *self._sequence_names]
        by_excerpt = dict[Excerpt, list[str]]()
        for name in names:
            by_excerpt.setdefault(self.excerpt(name), []).append(name)
        for excerpt, array_names in by_excerpt.items():
            begin = 0
            for part, first, last in self._located(excerpt):
                end = begin + last - first
                for name in array_names:
                    start, edges = self._starts(part, name), self._starts(excerpt, name)
                    rows = slice(int(start[first]), int(start[last]))
                    yield part, name, rows, slice(int(edges[begin]), int(edges[end]))
                begin = end

    def _starts(self, rows: PartReader | Excerpt, name: str) -> Array:
        """Return the first row of each sequence of a part, or of an excerpt, in an array."""
        if name in self._map_names:
            return rows.square_start
        return rows.sequence_start if name in self._sequence_names else rows.token_start

    @cached_property
    def nbytes(self) -> int:
        """Return the number of uncompressed bytes of tokens and maps that `read` reads."""
        names = [*self._token_names, *self._map_names]
        return sum(self._rows(name) * self._row_bytes(name) for name in names)

    def _rows(self, name: str) -> int:
        """Return the number of rows that are read from an array."""
        return int(self._starts(self.excerpt(name), name)[-1])

    def _row_bytes(self, name: str) -> int:
        spec = self._specs[name]
        return spec.dtype.itemsize * prod(spec.shape[1:])

    def prefetch(self) -> None:
        """Request what `read` will read from the disk or network. Raises Unreachable."""
        # Before its rows can be requested, an array needs its zarr.json and the index of its shard.
        if self._index.remote:
            self._open()
        elif self._start[False][-1] < FEW_TOKENS:
            return  # prefetching would take longer than reading
        with suppress(StoreError):  # `read` will raise it
            for part, name, rows, _ in self._pieces():
                part.array(name).prefetch(rows.start, rows.stop)

    def _open(self) -> None:
        """Open all arrays that are read, concurrently."""
        names = [
            "sequence/token_start", "sequence/document", *self._ragged_names, *self._token_names,
            *self._map_names, *self._sequence_names,
        ]  # fmt: skip
        parts = dict.fromkeys(part for part, _ in self._parts)
        # Names before parts: token_start of all parts comes first, as all other reads need it.
        pairs = [(stored, part) for name in names for part in parts for stored in part.stored(name)]

        def opened(pair: tuple[str, PartReader]) -> None:
            name, part = pair
            with suppress(StoreError):
                part.expect(name)
                part.array(name)

        with ThreadPoolExecutor(AT_ONCE, "open-at-once") as readers:
            # The list raises what a thread raised, such as Unreachable; map alone would drop it.
            list(readers.map(opened, pairs))

    def check_values(self, calibration: Calibration, lawful: dict[tuple[str, ...], Array]) -> None:
        """Check the laws of values (FORMAT.md, section 6) that concern a single array. Raises
        StoreError, which names the token.

        lawful: for each set of array names, bool [n]: the sequences of the store that passed
            before, so that later epochs do not check them again.
        """
        arrays = self.token | self.maps | self.sequence
        seen = lawful.setdefault(tuple(arrays), np.zeros(len(self._index), bool))
        sequences = self.index if self._requested is None else self.index[self._requested]
        if seen[sequences].all():
            return
        arrays |= {f"view{self.view}/logits/{key}": values for key, values in self.draws.items()}
        for name, values in arrays.items():
            if violation := find_violation(self.features, calibration, name, values):
                part, line = self._locate(name, violation)
                raise StoreError(f"{part.where}: {line}; {NO_NUMBERS}")
        seen[sequences] = True

    def _locate(self, name: str, violation: Violation) -> tuple[PartReader, str]:
        """Return the part with a violation, and a line that describes the violation and its
        place."""
        draws = self.draw_start if name.endswith(("/logits/ids", "/logits/counts")) else None
        row, excerpt = violation.row, self.excerpt(name) if draws is None else self.ragged
        if draws is not None:
            row = int(np.searchsorted(draws, row, "right")) - 1  # of the draw's token
        edges, begin = self._starts(excerpt, name), 0
        sequence = int(np.searchsorted(edges, row, "right")) - 1
        for part, first, last in self._located(excerpt):
            if sequence < begin + last - first:
                row += int(self._starts(part, name)[first + sequence - begin] - edges[sequence])
                if draws is not None:
                    return part, line_of_token(part, name, row, violation.problem)
                return part, line_of(part, name, violation._replace(row=row))
            begin += last - first
        raise AssertionError(name)

    def check(self, check: ReadingCheck, share: int = 0, shares: int = 1) -> None:
        """Start to check whole arrays of the pool's parts. The parts are divided among `shares`
        processes; only the parts of process `share` are checked."""
        groups = ["sequence/", "text/", f"{span_kind(self.view).group}/"]
        groups += [f"view{self.view}/logits/"] * bool(self.logits)
        read = {*self._token_names, *self._map_names, *self._sequence_names}
        for part, _ in self._parts:
            # Processes that share a stream share its checks: each part is checked by one of them.
            if (part.part.number - share) % shares == 0:
                names = [n for n in part.names() if n in read or n.startswith(tuple(groups))]
                check.submit(part, sorted(names))

    def read(self, buffers: Buffers) -> None:
        """Read all arrays into the buffers; for a remote store, several at once."""
        if not self._index.remote:
            self._read(buffers, map)
            return
        with ThreadPoolExecutor(AT_ONCE, "read-at-once") as readers:
            # Positions in the parts come first, for all parts at once: all other reads need them.
            list(readers.map(lambda run: run[0].token_start, self._parts))
        with ThreadPoolExecutor(DECODERS, "read-at-once") as readers:
            self._read(buffers, readers.map)

    def _read(self, buffers: Buffers, mapper: Callable[..., Iterable[Any]]) -> None:
        def take(names: list[str]) -> dict[str, Array]:
            buffered = {}
            for name in names:
                spec = self._specs[name]
                shape = self._rows(name), *spec.shape[1:]
                buffered[name] = buffers.get(name, shape, spec.dtype)
            return buffered

        pieces = list(self._pieces())  # checks the parts' sizes before memory is allocated
        self.token = take(self._token_names)
        self.maps = take(self._map_names)
        self.sequence = take(self._sequence_names)
        arrays = self.token | self.maps | self.sequence

        def read(piece: tuple[PartReader, str, slice, slice]) -> None:
            part, name, rows, target = piece
            part.array(name).read_into(rows.start, rows.stop, arrays[name][target])

        # The built-in map runs `read` only when it is iterated; a thread pool's map raises errors
        # only then.
        for _ in mapper(read, pieces):
            pass
        self._gather_ragged(list(mapper(self._ragged, self._located(self.ragged))))

    def _ragged(self, run: tuple[PartReader, int, int]) -> tuple[Any, ...]:
        """Read documents, numbers of spans, spans (`PartReader.spans`) and draws of a run."""
        part, first, last = run
        edges, masked = part.spans(self.view, first, last)
        draws = None
        if self.logits and self.logits.tier == "sample":
            tokens = int(part.token_start[first]), int(part.token_start[last])
            draws = part.draws(self.view, *tokens)
        return part.document[first:last], np.diff(edges), masked, draws

    def _gather_ragged(self, runs: list[tuple[Any, ...]]) -> None:
        documents, span_sizes, spans, draws = zip(*runs, strict=True)
        self.document, self.spans = np.concatenate(documents), np.concatenate(spans)
        self.span_start = starts(np.concatenate(span_sizes))
        self.draws: dict[str, Array] = {}
        self.draw_start: Array | None = None
        if draws[0] is not None:
            sizes, ids, counts = (np.concatenate(pieces) for pieces in zip(*draws, strict=True))
            self.draw_start, self.draws = starts(sizes), {"ids": ids, "counts": counts}

    @cached_property
    def texts(self) -> list[str]:
        """Return the texts of the `ragged` excerpt, read at first use, as not every training needs
        them.

        Sequences that are not requested have "".
        """
        texts: list[str] = []
        requested = np.ones(len(self.ragged.token_start) - 1, bool)
        if self._requested is not None:
            requested[:] = False
            requested[self.ragged.number[self._requested]] = True
        for part, first, last in self._located(self.ragged):
            chosen = requested[len(texts) : len(texts) + last - first]
            texts += part.texts(first, last, chosen)
        return texts
