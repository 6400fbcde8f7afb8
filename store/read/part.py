"""Read one part of a store: arrays are opened one by one, read by slices, and cached in memory if
requested."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from threading import Lock

import numpy as np

from teachonce.store.containers.interface import Slices, StoreSource
from teachonce.store.containers.network import with_refetches
from teachonce.store.errors import NO_NUMBERS, VERIFY, StoreError, without_remedy
from teachonce.store.format.codecs.built_in import look_up
from teachonce.store.format.features import Features
from teachonce.store.format.layout import EMBEDDING, part_arrays, span_kind
from teachonce.store.format.manifest import Part, digest
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.support.arrays import Array, Floats, starts

SLICE_BYTES = 2**24  # decoded bytes of an array in memory while it is checked
DAMAGED = f"the store is damaged: {VERIFY}"


def row_slices(array: Slices, least: int) -> Iterator[tuple[int, Array]]:
    """Read an array in slices of at most SLICE_BYTES, but of at least `least` rows: yield the
    number of the first row, and the rows."""
    row = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    fitting = max(1, SLICE_BYTES // max(1, row))
    # A power of two, mostly a multiple of the rows of a chunk, so that few chunks are decoded
    # twice.
    step = max(least, 1 << (fitting.bit_length() - 1))
    for begin in range(0, array.shape[0], step):
        yield begin, array.read(begin, min(begin + step, array.shape[0]))


def checksum(array: Slices) -> str:
    """Return the hexadecimal SHA-256 of an array, as in the manifest. The array is read some rows
    at a time."""
    sha256 = hashlib.sha256()
    for _, rows in row_slices(array, BLOCK):
        little = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<"))
        sha256.update(little.data if little.size else b"")
    return sha256.hexdigest()


class RankedIds:
    """Reads slices of the ids [N, K] of ranked logits.

    places: [N, K], the index of each id in `distinct`. distinct: [R], the different ids of a part.
    """

    def __init__(self, places: Slices, distinct: Array, where: str) -> None:
        self.shape, self.dtype = places.shape, places.dtype
        self._places, self._distinct, self._where = places, distinct, where

    def read(self, begin: int, end: int) -> Array:
        places = self._places.read(begin, end)  # may be a view of a cache
        return self._decoded(places, np.empty_like(places))

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._places.read_into(begin, end, out)
        self._decoded(out, out)

    def prefetch(self, begin: int, end: int) -> None:
        self._places.prefetch(begin, end)

    def _decoded(self, places: Array, out: Array) -> Array:
        number = len(self._distinct)
        # Checked before the look-up, which clips a wrong place silently.
        if places.size and places.max() >= number:
            raise StoreError(
                f"{self._where} holds an index that is not one of its {number} distinct ids;"
                f" {NO_NUMBERS}"
            )
        look_up(self._distinct, places, out)
        return out


BLOCK = 4096  # rows that share a flag; for uint8 maps, a flag a row would double the memory


class CachedSlices:
    """Reads slices of an array once and then serves them from memory, with a flag for each BLOCK
    of rows that has been read."""

    def __init__(self, slices: Slices) -> None:
        self._slices, self.shape, self.dtype = slices, slices.shape, slices.dtype
        self._rows = np.empty(self.shape, self.dtype)  # takes memory only when rows are written
        self._cached = np.zeros(-(-self.shape[0] // BLOCK), bool)
        self._filling = Lock()

    def read(self, begin: int, end: int) -> Array:
        end = min(end, self.shape[0])
        self._fill(begin, end)
        rows = self._rows[begin:end]
        # A view of the cache: a change in place would stay for all later epochs.
        rows.flags.writeable = False
        return rows

    def read_into(self, begin: int, end: int, out: Array) -> None:
        self._fill(begin, end)
        out[...] = self._rows[begin:end]

    def prefetch(self, begin: int, end: int) -> None:
        if not self._cached[_blocks(begin, end)].all():
            self._slices.prefetch(begin, end)

    def _fill(self, begin: int, end: int) -> None:
        blocks = _blocks(begin, end)
        # Read without the lock: a flag is set after its rows are there, and never unset.
        if self._cached[blocks].all():
            return
        # A block is never written twice: another reader may hold a view of it.
        with self._filling:
            edges = np.flatnonzero(np.diff(self._cached[blocks], prepend=True, append=True))
            for first, last in (blocks.start + edges.reshape(-1, 2)).tolist():
                low, high = first * BLOCK, min(last * BLOCK, self.shape[0])
                self._slices.read_into(low, high, self._rows[low:high])
                self._cached[first:last] = True


def _blocks(begin: int, end: int) -> slice:
    """Return the blocks that contain rows begin..end."""
    return slice(begin // BLOCK, -(-end // BLOCK))


class PartReader:
    """Reads slices of a part's arrays; checks an array's shape and dtype when it opens it."""

    def __init__(
        self,
        source: StoreSource,
        part: Part,
        features: Features,
        lengths: Array | None = None,
        cached: Callable[[str], bool] | None = None,
        watch: ChangeWatch | None = None,
    ) -> None:
        """Open no array yet.

        lengths: int [n], the number of tokens of each sequence in the manifest; None if the
            manifest has none.
        cached: whether an array, by its name, stays in memory after its first read.
        watch: makes reads raise StoreError soon after another process rewrites the store.
        """
        self._explaining = watch.reporting_changes if watch else nullcontext
        self._source, self.part, self.features = source, part, features
        self._lengths, self._cached = lengths, cached
        self.where = f"{source.path}: part {part.number}"
        self._specs = part_arrays(features, part.counts)
        self._open: dict[str, Slices] = {}

    def array(self, name: str) -> Slices:
        """Open an array of the part. Raises StoreError if it does not match the manifest.

        For ranked logits, the array `ids` can be opened, too; it is computed from stored arrays.
        """
        if name not in self._open:
            if name not in self._specs and name.endswith("/logits/ids"):
                self._open[name] = self._ranked(name.removesuffix("/ids"))
                return self._open[name]
            array = with_refetches(self._source.remote, lambda: self._opened(name))
            is_cached = self._cached is not None and self._cached(name)
            self._open[name] = CachedSlices(array) if is_cached else array
        return self._open[name]

    def _ranked(self, group: str) -> RankedIds:
        """Open the ids of the ranked logits at path `group` in the part (FORMAT.md, section 6).
        Raises StoreError if the list of distinct ids has an id twice, or an id outside the
        vocabulary."""
        distinct, most = self.all(f"{group}/distinct"), self.features.vocabulary
        ordered = np.sort(distinct)
        if (ordered >= most).any() or (ordered[1:] == ordered[:-1]).any():
            raise StoreError(
                f"{self.where}: {group}/distinct has an id twice, or one outside the vocabulary of"
                f" {most}; {NO_NUMBERS}"
            )
        return RankedIds(self.array(f"{group}/places"), distinct, f"{self.where}: {group}")

    def stored(self, name: str) -> list[str]:
        """List the stored arrays from which `name` is read: two for the ids of ranked logits."""
        if name in self._specs:
            return [name]
        return [f"{name.removesuffix('/ids')}/{leaf}" for leaf in ("distinct", "places")]

    def expect(self, name: str) -> None:
        """Avoid the request for a stored array's metadata, if they follow from the manifest."""
        if name not in self._open and (fingerprint := self.part.arrays[name].fingerprint):
            group = f"parts/{self.part.number}"
            self._source.expect(group, name, self._specs[name], fingerprint)

    def _opened(self, name: str) -> Slices:
        spec, path = self._specs[name], f"parts/{self.part.number}/{name}"
        try:
            array = self._source.array(path)
        except StoreError as error:
            raise StoreError(f"{without_remedy(error)}; {DAMAGED}") from error
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise StoreError(
                f"{self.where}: {name} is {array.dtype}{list(array.shape)}, the manifest has "
                f"{spec.dtype}{list(spec.shape)}; {DAMAGED}"
            )
        # Before any read, because zarr.json determines how the chunks are decoded.
        fingerprint = self.part.arrays[name].fingerprint
        if fingerprint and self._source.fingerprint(path) != fingerprint:
            self._source.forget(path)
            raise StoreError(f"{self.where}: {name} has an altered zarr.json; {DAMAGED}")
        return array

    def read(self, name: str, begin: int, end: int) -> Array:
        """Read rows begin..end of an array as stored, without decoding them. Ids of ranked logits
        are computed."""
        with self._explaining():
            return self.array(name).read(begin, end)

    def all(self, name: str) -> Array:
        """Read a whole array as stored. Raises StoreError if its checksum differs."""

        def read() -> Array:
            values = self.read(name, 0, self._specs[name].shape[0])
            self._compare(name, digest(values))
            return values

        return with_refetches(self._source.remote, read)

    def check(self, name: str) -> None:
        """Compare an array with its checksum, some rows at a time. Raises StoreError if it
        differs."""
        with_refetches(self._source.remote, lambda: self._compare(name, checksum(self.array(name))))

    def _compare(self, name: str, sha256: str) -> None:
        if sha256 != self.part.arrays[name].sha256:
            # The cached bytes are dropped, so that another attempt fetches them again.
            self._source.forget(f"parts/{self.part.number}/{name}")
            self._open.pop(name, None)
            raise StoreError(f"{self.where}: {name} does not match its checksum; {DAMAGED}")

    def names(self) -> list[str]:
        """List the paths of the part's arrays."""
        return list(self._specs)

    def _start(self, name: str, total: int, longest: int) -> Array:
        start = self.read(name, 0, self._specs[name].shape[0])
        sizes = np.diff(start)
        if start[0] != 0 or start[-1] != total or sizes.min() < 0 or sizes.max() > longest:
            raise StoreError(f"{self.where}: {name} does not ascend from 0 to {total}; {DAMAGED}")
        return start

    @cached_property
    def token_start(self) -> Array:
        """Return int64 [n + 1], where the tokens of each sequence begin. Raises StoreError if the
        array is damaged."""
        counts = self.part.counts
        start = self._start("sequence/token_start", counts.tokens, self.features.max_length)
        if np.diff(start).min() < 1:
            raise StoreError(f"{self.where}: a sequence has no token; {DAMAGED}")
        # The start of a map follows from the lengths before it, so wrong lengths would give the map
        # of another sequence.
        if int((np.diff(start) ** 2).sum()) != counts.squares:
            raise StoreError(f"{self.where}: the lengths do not match counts.squares; {DAMAGED}")
        # Batches are planned by the lengths in the manifest, so wrong ones would give rows of other
        # sequences (FORMAT.md, section 8).
        if self._lengths is not None and not np.array_equal(np.diff(start), self._lengths):
            raise StoreError(
                f"{self.where}: sequence/token_start and the manifest give different lengths;"
                f" {DAMAGED}"
            )
        return start

    @cached_property
    def sequence_start(self) -> Array:
        """Return 0..n, int64 [n + 1]: the bounds of sequences in an array with one row for each
        sequence. It is used like `token_start`."""
        return np.arange(self.part.counts.sequences + 1)

    @cached_property
    def square_start(self) -> Array:
        """Return int64 [n + 1], where the attention map of each sequence begins."""
        return starts(np.diff(self.token_start) ** 2)

    @cached_property
    def text_start(self) -> Array:
        """Return int64 [n + 1], where the text of each sequence begins, in bytes."""
        size = self.part.counts.text_bytes
        return self._start("sequence/text_start", size, size)

    @cached_property
    def document(self) -> Array:
        """Return int64 [n], the document number of each sequence."""
        return self.all("sequence/document")

    def draw_start(self, view: int, begin: int, end: int) -> Array:
        """Return int64 [end - begin + 1], the first sampled id of each of tokens begin..end."""
        return self._ragged(f"view{view}/logits/start", begin, end, self.part.counts.draws[view])

    def draws(self, view: int, begin: int, end: int) -> tuple[Array, Array, Array]:
        """Read the samples of tokens begin..end: the number of ids of each token, ids [M], counts
        [M]."""
        start = self.draw_start(view, begin, end)
        flat = int(start[0]), int(start[-1])
        ids, counts = (self.read(f"view{view}/logits/{key}", *flat) for key in ("ids", "counts"))
        return np.diff(start), ids, counts

    def _ragged(self, name: str, begin: int, end: int, total: int) -> Array:
        # Only the rows of the slice are read and checked: `verify` checks both ends of the array.
        start = self.read(name, begin, end + 1)
        if start[0] < 0 or start[-1] > total or (np.diff(start) < 0).any():
            raise StoreError(f"{self.where}: {name} is not ascending within {total}; {DAMAGED}")
        return start

    def texts(self, begin: int, end: int, chosen: Array | None = None) -> list[str]:
        """Read the texts of sequences begin..end; "" where `chosen`, bool [n], is False.

        Raises StoreError for bytes that are not UTF-8.
        """
        start = self.text_start[begin : end + 1]
        data = self.read("text/utf8", int(start[0]), int(start[-1])).tobytes()
        left, right = start[:-1] - start[0], start[1:] - start[0]
        if chosen is not None:
            right = np.where(chosen, right, left)
        try:
            pairs = zip(left.tolist(), right.tolist(), strict=True)
            return [data[low:high].decode("utf-8") for low, high in pairs]
        except UnicodeDecodeError as error:
            raise StoreError(f"{self.where}: text is not UTF-8 ({error}); {DAMAGED}") from error

    def vectors(self, begin: int, end: int) -> Floats:
        """Read float32 [n, W], the vectors of sequences begin..end."""
        spec, codec = self.features.embedding, self.features.level.embedding
        stored = {key: self.read(f"{EMBEDDING}/{key}", begin, end) for key in codec.names}
        values: Floats = codec.decode(stored, (spec.width if spec else 0,))
        return values

    def spans(self, view: int, begin: int, end: int) -> tuple[Array, Array]:
        """Read the masked words of sequences begin..end or, in view 0, the messages of chats.
        Returns the first span of each sequence, [n + 1] from 0, and the spans, int32 [M, 3]."""
        if view == 0 and not self.features.messages:
            return np.zeros(end - begin + 1, np.int64), np.empty((0, 3), np.int32)
        kind = span_kind(view)
        start = self._ragged(f"{kind.group}/start", begin, end, self.part.counts.spans[view])
        left, right = int(start[0]), int(start[-1])
        names = [f"{kind.group}/{key}" for key in ("begin", "end", kind.number)]
        columns = [self.read(name, left, right) for name in names]
        return start - left, np.stack([column.astype(np.int32) for column in columns], axis=1)
