"""Read the shards of a store over a network: whole chunks, in runs of about a megabyte, decoded as
those of a local folder are."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock

import numpy as np

from teachonce.store.containers.blosc import Damage
from teachonce.store.containers.disk_cache import Piece
from teachonce.store.containers.far import Far, Range
from teachonce.store.containers.network import surely
from teachonce.store.containers.zarr.shards import (
    Layout,
    check_fits,
    decode_rows,
    index_bytes,
    read_index,
    row_pieces,
)
from teachonce.store.errors import VERIFY, StoreError
from teachonce.support.arrays import Array

RUN = 2**20  # bytes that are asked for at once, unless a chunk has more
SMALL = 4 * RUN  # decoded bytes of an array that is taken to be stored in RUN bytes


class FarSlices:
    """Slices of rows of an array that is one shard, over a network."""

    waits = False

    def __init__(self, far: Far, name: str, layout: Layout, where: str) -> None:
        """Fetch the index, or all of a small array. FileNotFoundError if it is missing."""
        self._far, self._name, self._layout, self._where = far, name, layout, where
        self.shape, self.dtype = layout.shape, layout.dtype
        decoded, tail = layout.shape[0] * layout.row_bytes, index_bytes(layout)
        self._first = Range(name, 0, RUN) if decoded <= SMALL else Range(name, -tail, tail)
        piece = far.get(self._first)
        self.size = piece.whole
        self._lock, self._index_lock = Lock(), Lock()
        self._runs: list[Range] | None = None
        self._used: dict[Range, int] = {}  # decoded bytes of runs that were read

    def _index(self) -> list[Range]:
        """The run of each chunk, and where the chunks lie. Raises Damage."""
        with self._index_lock:
            if self._runs is not None:
                return self._runs
            layout, tail = self._layout, index_bytes(self._layout)
            end, piece = self.size - tail, self._far.get(self._first)
            if end < 0:
                raise Damage(f"the file has {self.size} bytes, too few for its index")
            here = piece.data
            if self._first.begin == 0 and self.size > len(here):  # not as small as it seemed
                here = self._far.get(Range(self._name, -tail, tail)).data
            self._places = read_index(here[len(here) - tail :], layout, end)
            whole = self._first.begin == 0 and self.size <= len(piece.data)
            if whole:
                self._runs = [self._first] * layout.chunks
            else:
                self._runs = _runs_of(self._name, self._places)
            self._totals: dict[Range, int] = {}
            for run, (_, size) in zip(self._runs, self._places, strict=True):
                more = layout.rows * layout.row_bytes if size else 0
                self._totals[run] = self._totals.get(run, 0) + more
            return self._runs

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        out = np.empty((max(0, end - begin), *self.shape[1:]), self.dtype)
        self.read_into(begin, end, out)
        return out

    def read_into(self, begin: int, end: int, out: Array) -> None:
        if begin < end:
            check_fits(self._layout, self._where, begin, end, out)
            surely(True, lambda: self._read_into(begin, end, out))

    def _read_into(self, begin: int, end: int, out: Array) -> None:
        target = out.reshape(-1).view(np.uint8)
        try:
            runs, held = self._index(), dict[Range, Piece]()
            for chunk, low, high, place in row_pieces(self._layout, begin, end):
                run, (first, size) = runs[chunk], self._places[chunk]
                if not size:
                    raise Damage(f"chunk {chunk} is missing or lies outside the file")
                if run not in held:
                    held = {run: self._far.get(run)}
                piece = held[run]
                data = piece.data[first - run.begin : first - run.begin + size]
                into, sound = target[place : place + high - low], chunk in piece.sound
                decode_rows(data, chunk, self._layout, low, high, into, sound)
                piece.sound.add(chunk)
                self._count(run, high - low)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self._where}: rows {begin}..{end} cannot be decoded ({self._name} is missing);"
                f" {VERIFY}"
            ) from error
        except (Damage, OSError) as error:
            self._forget()
            raise StoreError(
                f"{self._where}: rows {begin}..{end} cannot be decoded ({error}); {VERIFY}"
            ) from error

    def _count(self, run: Range, decoded: int) -> None:
        """Let go of a run of which all was read once: an epoch reads each row once."""
        with self._lock:
            used = self._used.get(run, 0) + decoded
            done = used >= self._totals[run]
            self._used[run] = 0 if done else used
        if done:
            self._far.used_up(run)

    def _forget(self) -> None:
        with self._index_lock:
            self._far.forget(self._name)
            self._runs = None

    def prefetch(self, begin: int, end: int) -> None:
        for run in self._wanted(begin, end):
            self._far.ask(run)

    def _wanted(self, begin: int, end: int) -> Iterator[Range]:
        try:
            runs = self._index()
        except (Damage, OSError):  # reading says what is wrong
            return
        rows = self._layout.rows
        yield from dict.fromkeys(runs[begin // rows : -(-end // rows)])


def _runs_of(name: str, places: list[list[int]]) -> list[Range]:
    """The range that is asked for, for the sake of each chunk: neighbours, up to RUN bytes."""
    order = sorted(range(len(places)), key=lambda chunk: places[chunk][0])
    runs, group, begin, end = [Range(name, 0, 0)] * len(places), list[int](), 0, 0
    for chunk in [*order, None]:
        low, size = places[chunk] if chunk is not None else (0, 0)
        if group and (chunk is None or low != end or low + size - begin > RUN):
            for each in group:
                runs[each] = Range(name, begin, end)
            group = []
        if chunk is not None and size:
            begin = begin if group else low
            end, group = low + size, [*group, chunk]
    return runs
