"""The index of a store of many parts: arrays that list its parts and are read page by page.

See FORMAT.md, section 8. A JSON list of a million parts would be 4 GB.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from threading import Lock
from typing import Any, overload

import numpy as np

from teachonce.store.errors import StoreError
from teachonce.store.format.features import Features
from teachonce.store.format.layout import MAX_COUNT, MAX_PART, Counts, PartShapes, part_arrays
from teachonce.store.format.manifest import DAMAGED, Entry, Part, length_dtype
from teachonce.support.arrays import Array, starts

GROUP = "index"
# A list of 1,000 parts opens in 63 ms. One of 10,000 takes 680 ms and 290 MB, an index 3 ms and 74
# MB.
FEW_PARTS = 4096  # up to this number, the manifest itself lists the parts
PAGE = 512  # parts
CACHED_PAGES = 8  # `Manifest.content` alternates between numbers of 1, 2, ..., 7 digits
DIGEST = 32  # bytes of a SHA-256
MAX_TOTAL = 2**62
Write = Callable[[str, Array], None]
Read = Callable[[str, Entry], Array]


def columns_of(features: Features) -> list[str]:
    """List the names of the arrays that every part has, in the order of the index."""
    empty = (0,) * features.views
    return sorted(part_arrays(features, Counts(1, 0, 0, 0, empty, empty)))


def _digests(parts: Sequence[Part], columns: Sequence[str], key: str) -> Array:
    """Return uint8 [parts, 32 * columns]: the field `key` (`sha256` or `fingerprint`) of every
    array's entry, zeros if the field is None."""
    none = bytes(DIGEST).hex()
    rows = "".join(getattr(part.arrays[name], key) or none for part in parts for name in columns)
    return np.frombuffer(bytes.fromhex(rows), np.uint8).reshape(len(parts), -1)


def _page(parts: Sequence[Part], lengths: Sequence[Array], columns: list[str]) -> dict[str, Array]:
    arrays = {
        "counts": np.array([[part.number, *part.counts.flat()] for part in parts], np.int64),
        "lengths": np.concatenate(lengths),
        "sha256": _digests(parts, columns, "sha256"),
    }
    if any(entry.fingerprint for part in parts for entry in part.arrays.values()):
        arrays["zarr_json"] = _digests(parts, columns, "fingerprint")
    return arrays


def write_index(
    parts: Iterable[tuple[Part, Array]], features: Features, write: Write
) -> dict[str, Any]:
    """Write the arrays of the index with `write`; return the entry of the index for the manifest.

    parts: in ascending order of their numbers, each with the lengths of its sequences (dtype
        `length_dtype`). One page of parts is in memory at a time.
    """
    columns, entries = columns_of(features), dict[str, Entry]()
    # `array`: 8 MB for a million parts, where a list of ints takes more than four times that.
    sequences, totals = array("q"), np.zeros(4 + 2 * features.views, np.int64)

    def put(name: str, values: Array) -> None:
        write(f"{GROUP}/{name}", values)
        entries[name] = Entry.of(values, None)

    following = iter(parts)
    for number in range(MAX_PART):
        batch = list(islice(following, PAGE))
        if not batch:
            break
        page, lengths = [part for part, _ in batch], [length for _, length in batch]
        arrays = _page(page, lengths, columns)
        for name, values in arrays.items():
            put(f"{number}/{name}", values)
        sequences.extend(arrays["counts"][:, 1].tolist())
        totals += arrays["counts"][:, 1:].sum(axis=0)
    put("first", starts(np.frombuffer(sequences, np.int64)))
    return {
        "number": len(sequences),
        "page": PAGE,
        "counts": Counts.of_flat(totals.tolist()).to_json(),
        "columns": columns,
        "arrays": {name: entries[name].to_json() for name in sorted(entries)},
    }


class IndexedLengths:
    """Reads the lengths of all sequences; caches each page of the index on first use."""

    def __init__(self, parts: IndexedParts) -> None:
        self._parts = parts
        self._first = parts.first[:: parts.page]  # of each page
        self._known = np.zeros(parts.pages, bool)
        self._lengths: Array = np.empty(0, length_dtype(parts.features))
        self._filling = Lock()

    def __getitem__(self, rows: slice | Array) -> Array:
        """Return the lengths of the given sequences, a slice or an array of numbers, with dtype
        `length_dtype`."""
        if not self._known.all():
            # Without the lock, a second thread could allocate again and lose pages already read.
            with self._filling:
                self._fill(rows)
        return self._lengths[rows]

    def _fill(self, rows: slice | Array) -> None:
        """Read the pages that have these rows, unless they were read before."""
        self._allocate()
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            low, high = np.searchsorted(self._first, [begin, end - 1], "right").tolist()
            pages = np.arange(low - 1, high)
        else:
            pages = np.searchsorted(self._first, rows, "right") - 1
        for page in np.unique(pages[~self._known[pages]]).tolist():
            lengths, begin = self._parts.page_lengths(page), int(self._first[page])
            self._lengths[begin : begin + len(lengths)] = lengths
            # Set last: another thread must not read rows that are not there yet.
            self._known[page] = True

    def _allocate(self) -> None:
        """Allocate memory for all lengths. Raises StoreError if a damaged index declares too many
        sequences for the memory."""
        if not self._known.any():
            try:
                self._lengths = np.empty(len(self), self._lengths.dtype)
            # NumPy raises ValueError for a size beyond the address space.
            except (MemoryError, ValueError):
                raise self._parts.damage(
                    f"{len(self):,} sequences do not fit into memory"
                ) from None

    def __len__(self) -> int:
        return int(self._parts.first[-1])


class IndexedParts(Sequence[Part]):
    """Reads the parts of a store from its index; the last CACHED_PAGES pages are cached.

    first: int64 [parts + 1], the first sequence of each part, then the number of all sequences.
    totals: the sums of all counts.
    """

    def __init__(self, listed: object, features: Features, where: str, read: Read) -> None:
        """Read only `first`.

        `read` returns the values of an array after it has checked them against an entry. Raises
        StoreError if the index is damaged.
        """
        self.features, self._where, self._read = features, where, read
        self._columns, self._shapes = columns_of(features), PartShapes(features)
        value = listed if isinstance(listed, Mapping) else {}
        self._count, self.page = (self._size(value.get(key)) for key in ("number", "page"))
        if value.get("columns") != self._columns:
            raise self.damage("its columns are not the arrays of the store's features")
        entries = value.get("arrays")
        if not isinstance(entries, Mapping):
            raise self.damage("it lists no arrays")
        self.entries = {name: Entry.from_json(e, where, name) for name, e in entries.items()}
        # Sums over all parts may exceed MAX_COUNT, the limit of one part.
        self.totals = Counts.from_json(value.get("counts"), features, where, MAX_TOTAL)
        self._check_names()
        # The only array that opening reads: a store of a million parts opens in 0.04 s.
        self.first = self._values("first", np.dtype(np.int64), (self._count + 1,))
        if self.first[0] != 0 or (np.diff(self.first) < 1).any():
            raise self.damage("first does not ascend from 0")
        if self.first[-1] != self.totals.sequences:
            raise self.damage("first does not end at the number of sequences")
        self._pages: OrderedDict[int, tuple[Array, Array, Array | None]] = OrderedDict()
        self._reading = Lock()
        self.lengths = IndexedLengths(self)

    def damage(self, problem: str) -> StoreError:
        """Return the error that describes what is wrong with the index."""
        return StoreError(f"{self._where}: the index of parts: {problem}; {DAMAGED}")

    def _size(self, number: object) -> int:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= MAX_PART:
            raise self.damage("number and page must be positive integers")
        return number

    def _check_names(self) -> None:
        # First the number of names: a forged index may declare a billion pages.
        fits = 3 * self.pages < len(self.entries) <= 1 + 4 * self.pages
        names = {"first"}
        for page in range(self.pages if fits else 0):
            page_names = {f"{page}/{key}" for key in ("counts", "lengths", "sha256")}
            names |= page_names | {f"{page}/zarr_json"} & self.entries.keys()
        if names != self.entries.keys():
            raise self.damage("its arrays do not match its pages")

    @property
    def pages(self) -> int:
        return -(-len(self) // self.page)

    def _values(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        entry = self.entries[name]
        # Before `_read` allocates: a forged entry may declare any shape.
        if entry.shape != shape or entry.dtype != dtype.name:
            expected = f"{dtype.name}{list(shape)}"
            raise self.damage(f"{name} is {entry.dtype}{list(entry.shape)}, expected {expected}")
        return self._read(f"{GROUP}/{name}", entry)

    def _rows(self, page: int) -> tuple[int, int]:
        return page * self.page, min((page + 1) * self.page, len(self))

    def page_lengths(self, page: int) -> Array:
        """Return the lengths of the sequences of a page, with dtype `length_dtype`. Raises
        StoreError if the page is damaged."""
        low, high = self._rows(page)
        count = int(self.first[high] - self.first[low])
        return self._values(f"{page}/lengths", length_dtype(self.features), (count,))

    def page_counts(self, page: int) -> Array:
        """Return int64 [parts, 5 + 2 * views]: numbers and counts of a page's parts.

        Raises StoreError if they are out of range or contradict `first`.
        """
        low, high = self._rows(page)
        width = 1 + len(self.totals.flat())
        counts = self._values(f"{page}/counts", np.dtype(np.int64), (high - low, width))
        numbers, sizes = counts[:, 0], counts[:, 1:]
        if numbers[0] < 0 or numbers[-1] >= MAX_PART or (np.diff(numbers) < 1).any():
            raise self.damage(f"part numbers of page {page} do not ascend")
        if sizes.min() < 0 or sizes.max() > MAX_COUNT:
            raise self.damage(f"counts of page {page} are out of range")
        if not np.array_equal(sizes[:, 0], np.diff(self.first[low : high + 1])):
            raise self.damage(f"counts of page {page} do not agree with first")
        return counts

    def _page_digests(self, page: int, key: str) -> Array:
        """Read the array `key` of a page, uint8 [parts, 32 * columns]: a checksum of every array of
        its parts."""
        low, high = self._rows(page)
        shape = high - low, DIGEST * len(self._columns)
        return self._values(f"{page}/{key}", np.dtype(np.uint8), shape)

    def _cached(self, page: int) -> tuple[Array, Array, Array | None]:
        """Return counts, checksums and fingerprints of a page; HDF5 stores have no fingerprints
        (None)."""
        # Held while reading, too: threads that need the same page would read it twice.
        with self._reading:
            content = self._pages.pop(page, None)
            if content is None:
                counts, sha256 = self.page_counts(page), self._page_digests(page, "sha256")
                printed = f"{page}/zarr_json" in self.entries
                content = counts, sha256, self._page_digests(page, "zarr_json") if printed else None
            self._pages[page] = content
            if len(self._pages) > CACHED_PAGES:
                self._pages.popitem(last=False)
            return content

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> list[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | list[Part]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self._where}: no part at place {index}; it has {len(self)}")
        page, row = divmod(index % len(self), self.page)
        counts, sha256, prints = self._cached(page)
        number, *sizes = counts[row].tolist()
        sizes_of_part = Counts.of_flat(sizes)
        shapes = self._shapes.of(sizes_of_part)
        sums = dict(zip(self._columns, _hex_digests(sha256[row]), strict=True))
        hashes = [] if prints is None else _hex_digests(prints[row])
        # 32 zeros stand for no fingerprint (FORMAT.md, section 8).
        fingerprints = {n: h for n, h in zip(self._columns, hashes, strict=False) if h.strip("0")}
        arrays = {n: Entry(*shape, sums[n], fingerprints.get(n)) for n, shape in shapes.items()}
        return Part(number, sizes_of_part, arrays)

    def checksums(self, places: Array) -> Iterator[bytes]:
        """Yield the JSON entries `"path": "checksum"` of all arrays of the parts with the indices
        `places`, sorted by path. Yields one text for consecutive parts on a page of the index."""
        # Making a `Part` with its entries for each part takes more than ten times as long.
        # The cache ends with the call: a page of lines has over twice the bytes of its digests.
        lines = lru_cache(CACHED_PAGES)(self._checksums_of_page)
        new = (np.diff(places) != 1) | (np.diff(places // self.page) != 0)
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(places)]
        first, pages = (places[edges[:-1]] % self.page).tolist(), places[edges[:-1]] // self.page
        for page, row, size in zip(pages.tolist(), first, np.diff(edges).tolist(), strict=True):
            table, filled = lines(page)
            piece = table[row : row + size].tobytes()[len(", ") :]
            yield piece.replace(b"\0", b"") if filled else piece

    def _checksums_of_page(self, page: int) -> tuple[Array, bool]:
        """Return uint8 [parts, bytes], for each part of a page a comma and its JSON lines. Also
        return whether zero bytes pad numbers that have fewer digits than the last one."""
        numbers = self.numbers[slice(*self._rows(page))]
        width = len(str(numbers[-1]))
        digits = numbers.astype(f"S{width}").view(np.uint8).reshape(-1, width)
        hexadecimal = self._page_digests(page, "sha256").tobytes().hex().encode()
        digests = np.frombuffer(hexadecimal, np.uint8).reshape(len(numbers), -1)
        size = 2 * DIGEST
        blank = [f', "parts/{width * "0"}/{name}": "{size * "0"}"' for name in self._columns]
        table = np.empty((len(numbers), sum(map(len, blank))), np.uint8)
        table[:] = np.frombuffer("".join(blank).encode("ascii"), np.uint8)
        end = 0
        for column, piece in enumerate(blank):
            begin, end = end + len(', "parts/'), end + len(piece)
            table[:, begin : begin + width] = digits
            table[:, end - 1 - size : end - 1] = digests[:, column * size : (column + 1) * size]
        return table, not digits.all()

    @cached_property
    def numbers(self) -> Array:
        """Return int64 [parts], the numbers of all parts. Raises StoreError if they do not
        ascend."""
        # Copies: a view would hold the counts of its whole page.
        pages = [self.page_counts(page)[:, 0].copy() for page in range(self.pages)]
        numbers = np.concatenate(pages)
        if (np.diff(numbers) < 1).any():
            raise self.damage("part numbers do not ascend")
        return numbers

    def check(self) -> None:
        """Read the whole index. Raises StoreError if it is incomplete or contradicts itself."""
        total = np.zeros(len(self.totals.flat()), np.int64)
        # `page_counts` compares numbers within a page, `numbers` also between pages.
        _ = self.numbers  # reads all of them
        for page in range(self.pages):
            counts, _, _ = self._cached(page)
            total += counts[:, 1:].sum(axis=0)
            self.page_lengths(page)
        if total.tolist() != self.totals.flat():
            raise self.damage("counts of the parts do not sum to the counts of the store")


def _hex_digests(row: Array) -> list[str]:
    """Return a row of the index as hexadecimal checksums, one for each array of a part."""
    text, size = row.tobytes().hex(), 2 * DIGEST
    return [text[begin : begin + size] for begin in range(0, len(text), size)]
