"""Stream a store: read pools of blocks, and gather batches of similar length from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from teachonce.store.errors import NO_NUMBERS, StoreError
from teachonce.store.format.codecs.codec import HiddenCodec
from teachonce.store.format.codecs.levels import Level
from teachonce.store.format.features import CONTEXT, LEARN, Calibration, Features
from teachonce.store.format.layout import EMBEDDING
from teachonce.store.format.value_laws import joint_violations
from teachonce.store.read.change_watch import ChangeWatch
from teachonce.store.read.part_index import PartIndex
from teachonce.store.read.part_laws import ReadingCheck, line_of_token
from teachonce.store.read.pool import Buffers, Excerpt, Pool
from teachonce.store.read.record import LazyMap, Logits, as_ids, decode_logits, learnt_tokens
from teachonce.store.read.stream_order import StreamOrder
from teachonce.support.arrays import Array, Floats, covering_spans_of_texts, ranges, starts
from teachonce.support.console import counted

AHEAD = 2**28  # uncompressed bytes that are requested ahead over a network
PoolBatches = tuple[Pool, list[Array]]  # a pool and its batches


@dataclass(frozen=True)
class HiddenBatch:
    """Holds the hidden states of N tokens as stored, and decodes them on request.

    stored: the arrays of the codec. exact: values float32 [N, D]. default: values int8 [N, D],
        scale float16 [N]. small: values uint8 [N, ceil(D/2)] (packed int4), scale [N, ceil(D/64)].
    mean, deviation: float32 [D], the store's calibration.
    """

    stored: Mapping[str, Array]
    mean: Floats
    deviation: Floats
    codec: HiddenCodec

    @property
    def values(self) -> Array:
        """Return the codes of the states; the states themselves with codec exact."""
        return self.stored["values"]

    @property
    def scale(self) -> Array | None:
        """Return the factors of the codes; None with codec exact."""
        return self.stored.get("scale")

    def __repr__(self) -> str:
        """Return only the sizes, as the arrays would fill screens."""
        return f"<HiddenBatch: {counted(len(self.values), 'teacher token')} x {len(self.mean):,}>"

    def normalised(self) -> Floats:
        """Return float32 [N, D], (state - mean) / deviation."""
        values: Floats = self.codec.decode_normalised(self.stored, self.mean, self.deviation)
        return values

    def states(self) -> Floats:
        """Return float32 [N, D], raw states."""
        states: Floats = self.codec.decode(self.stored, self.mean, self.deviation)
        return states


@dataclass(frozen=True)
class Batch:
    """Holds B sequences with N tokens, flat. The arrays are valid until the next batch.

    index, document: int64 [B], numbers of the sequences and of their documents.
    start: int64 [B + 1], first token of each sequence.
    token_ids: int32 [N]. offsets: int32 [N, 2]. special: bool [N].
    spans_start, spans: int64 [B + 1] and int32 [M, 3], the masked words.
    logits: None if the store has none or the stream does not read them.
    attention: by name, float32 [sum L^2], concatenated row-major maps, decoded on access.
    labels, tags: gold labels int32 [B] or tags [N] of a store with a task, -1 for none; else None.
    class_logits, tag_logits: the teacher's, float32 [B, C] or [N, C]; else None.
    learnt: bool [N], the tokens that students are trained on; None for all. The other tokens only
        give context, or are marks and turns of a chat that students are not trained on.
    messages: int64 [B + 1] and int32 [M, 3], the messages of chats: begin and end of the content,
        in characters of the text, and role (`ROLES`). None in masked views and other stores.
    stored: the batch's arrays by path, not decoded (FORMAT.md, section 6). Callers may decode them
        on another device with the codecs of `level`.
    """

    index: Array
    start: Array
    token_ids: Array
    offsets: Array
    special: Array
    document: Array
    spans_start: Array
    spans: Array
    hidden: Mapping[str, HiddenBatch]
    logits: Logits | None
    attention: Mapping[str, Floats]
    stored: Mapping[str, Array]
    level: Level
    load_texts: Callable[[], list[str]]
    load_embedding: Callable[[], Floats | None]
    labels: Array | None = None
    tags: Array | None = None
    class_logits: Floats | None = None
    tag_logits: Floats | None = None
    learnt: Array | None = None
    messages: tuple[Array, Array] | None = None

    @cached_property
    def embedding(self) -> Floats | None:
        """Return float32 [B, W], the teacher's vectors of the texts, decoded on first use; None if
        the store has none or the stream does not read them."""
        return self.load_embedding()

    @cached_property
    def texts(self) -> list[str]:
        """Return the texts of the B sequences, read on first use."""
        return self.load_texts()

    @cached_property
    def mask(self) -> Array:
        """Return bool [N], true for tokens that overlap a masked word, computed on first use."""
        lengths, counts = np.diff(self.start), np.diff(self.spans_start)
        return covering_spans_of_texts(self.offsets, lengths, self.spans, counts) >= 0

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        """Return only the sizes, as the arrays would fill screens."""
        tokens = counted(len(self.token_ids), "teacher token")
        return f"<Batch: {counted(len(self), 'sequence')}, {tokens}>"


class Streamer:
    """Makes streams of a store. The next stream reuses the buffers of one that has ended.

    A stream raises StoreError soon after the store was rewritten; see `ChangeWatch`.
    """

    def __init__(self, index: PartIndex, calibration: Calibration, watch: ChangeWatch) -> None:
        self._index, self._calibration, self._watch = index, calibration, watch
        self._spare: list[Buffers] = []
        self._sound: set[tuple[int, str]] = set()  # arrays that a stream has checked
        self._lawful = dict[tuple[str, ...], Array]()

    def close(self) -> None:
        """Free the buffers."""
        self._spare.clear()

    def stream(self, order: StreamOrder, check: bool = False) -> Iterator[Batch]:
        """Yield the batches of an order; see `FeatureStore.stream`."""
        buffers = Buffers()
        checked = ReadingCheck(self._sound)
        pools = (
            (Pool(self._index, blocks, order.view, order.features, batches), batches)
            for blocks, batches in order.chosen_pools(self._index)
        )
        read = (self._read_far if self._index.remote else self._read_near)(pools)
        try:
            for pool, batches in read:
                if check and not self._index.remote:  # a remote array would be fetched twice
                    pool.check(checked, order.skip, order.every)
                for sequences in batches:
                    # Without waiting: checking a part may take longer than using its first batches.
                    checked.raise_errors()
                    self._watch.check_if_due()
                    batch = _gather(pool, self._calibration, pool.place[sequences], buffers)
                    if check:
                        self._compare(batch, pool)
                    yield batch
            checked.raise_errors(wait=True)
            if not self._index.remote:  # one stat; over a network a request
                self._watch.check()
        except StoreError:
            self._watch.check()  # a part that was replaced looks like damage
            raise
        finally:
            checked.close()
            read.close()

    def _compare(self, batch: Batch, pool: Pool) -> None:
        """Check the laws of values (FORMAT.md, section 6) that compare several arrays of a batch,
        unless all its sequences were checked before.

        Raises StoreError.
        """
        prefix = f"view{pool.view}"
        names = tuple(sorted(name for name in batch.stored if name.startswith(f"{prefix}/")))
        # `Pool.check_values` has keys in the same dictionary; none begins with "together".
        seen = self._lawful.setdefault(("together", *names), np.zeros(len(self._index), bool))
        if seen[batch.index].all():
            return
        sample = batch.logits if batch.logits and batch.logits.tier == "sample" else None
        draws = (sample.start, sample.ids, sample.counts) if sample else None
        lengths = np.diff(batch.start)
        for name, violation in joint_violations(
            pool.features, prefix, batch.stored, lengths, draws
        ):
            sequence = int(np.searchsorted(batch.start, violation.row, "right")) - 1
            part, position = self._index.locate(int(batch.index[sequence]))
            row = int(part.token_start[position]) + violation.row - int(batch.start[sequence])
            line = line_of_token(part, violation.leaf_of(name), row, violation.problem)
            raise StoreError(f"{part.where}: {line}; {NO_NUMBERS}")
        seen[batch.index] = True

    def _read_near(self, pools: Iterator[PoolBatches]) -> Generator[PoolBatches]:
        """Read each pool from a local disk when it is needed. While a pool is used, the next one
        is prefetched."""
        try:
            # No test for an empty list first: another thread's stream may take the last buffers in
            # between.
            buffers = self._spare.pop()
        except IndexError:
            buffers = Buffers()
        ahead = ThreadPoolExecutor(1, "read-ahead")  # prefetching takes time, too
        try:
            following = next(pools, None)
            while following:
                current, following = following, None
                current[0].read(buffers)
                current[0].check_values(self._calibration, self._lawful)
                if following := next(pools, None):
                    # From a cold disk, this raises 0.93 to 1.03 million tokens a second.
                    ahead.submit(following[0].prefetch)
                yield current
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)
            # The buffers can be reused: the thread only prefetches, and writes into no buffer.
            # Batches are copies, so streams can use the same buffers one after the other.
            self._spare.append(buffers)

    def _read_far(self, pools: Iterator[PoolBatches]) -> Generator[PoolBatches]:
        """Read each pool over a network while the previous one is used. Meanwhile request the
        following pools, up to about AHEAD bytes."""
        # Two threads: requests for later pools must not wait until a pool is read and checked.
        reading, prefetching = (
            ThreadPoolExecutor(1, "read-ahead"),
            ThreadPoolExecutor(1, "prefetch"),
        )
        free = [Buffers(), Buffers()]
        requested: deque[tuple[PoolBatches, Future[None]]] = deque()
        closed = Event()

        def request_next() -> bool:
            """Request the next pool; return whether there is one."""
            if current := next(pools, None):
                requested.append((current, prefetching.submit(current[0].prefetch)))
            return current is not None

        def start_next() -> tuple[PoolBatches, Future[None]] | None:
            if not requested and not request_next():
                return None
            (current, fetched), buffers = requested.popleft(), free.pop(0)
            free.append(buffers)  # batches of the previous pool still use the other buffers

            def read() -> None:
                fetched.result()
                if not closed.is_set():
                    current[0].read(buffers)
                    current[0].check_values(self._calibration, self._lawful)

            return current, reading.submit(read)

        try:
            following = start_next()
            while following:
                current, future = following
                future.result()
                following = start_next()
                # Not before the first pool is read: it would share the network with later ones, and
                # the first batch took a tenth longer.
                while sum(pool.nbytes for (pool, _), _ in requested) < AHEAD and request_next():
                    pass
                yield current
        finally:  # a thread may still write into the buffers, so they are not reused
            # A pool that is queued already is not read: the process would fetch it before it exits.
            closed.set()
            for threads in (prefetching, reading):
                threads.shutdown(wait=False, cancel_futures=True)

    def gather(
        self, batches: Iterable[ArrayLike], view: int, kinds: tuple[str, ...]
    ) -> Iterator[Batch]:
        """Yield batches of these sequences; see `FeatureStore.gather`."""
        buffers, pool_buffers, last = Buffers(), Buffers(), len(self._index) - 1
        for batch in batches:
            sequences = np.asarray(batch)
            # As integers, fractions would lose their digits, and a mask would be sequences 0 and 1.
            flat = sequences.ndim == 1 and len(sequences) and sequences.dtype.kind in "iu"
            if not flat or not 0 <= sequences.min() <= sequences.max() <= last:
                form = f"{sequences.dtype}{list(sequences.shape)}"
                got = f"{sequences.min()}..{sequences.max()}" if flat else form
                raise StoreError(
                    f"{self._index.path}: a batch to gather is a list of sequence numbers in"
                    f" 0..{last}; got {got}"
                )
            sequences = sequences.astype(np.int64)
            blocks = np.stack([sequences, sequences + 1], axis=1)
            with self._watch.reporting_changes():
                pool = Pool(self._index, blocks, view, kinds)
                pool.read(pool_buffers)
                pool.check_values(self._calibration, self._lawful)
            yield _gather(pool, self._calibration, pool.place, buffers)


def _gather_stored(pool: Pool, positions: Array, buffers: Buffers) -> dict[str, Array]:
    """Copy the stored arrays of chosen sequences."""
    stored, lengths, rows_of = {}, pool.lengths[positions], dict[Excerpt, Array]()
    for name, array in pool.token.items():
        excerpt = pool.excerpt(name)
        if excerpt not in rows_of:
            begin = excerpt.token_start[excerpt.number[positions]]
            rows_of[excerpt] = ranges(begin, lengths)
        rows = rows_of[excerpt]
        stored[name] = buffers.get(name, (len(rows), *array.shape[1:]), array.dtype)
        # "clip": with the default mode NumPy fills a buffer first and copies that into `out`.
        np.take(array, rows, axis=0, out=stored[name], mode="clip")
    for name, array in pool.maps.items():
        excerpt = pool.excerpt(name)
        stored[name] = buffers.get(name, (int((lengths**2).sum()),), array.dtype)
        begin = excerpt.square_start[excerpt.number[positions]]
        gather_maps(array, begin, lengths, stored[name])
    for name, array in pool.sequence.items():
        stored[name] = buffers.get(name, (len(positions), *array.shape[1:]), array.dtype)
        np.take(array, pool.excerpt(name).number[positions], axis=0, out=stored[name], mode="clip")
    return stored


def _gather(pool: Pool, calibration: Calibration, positions: Array, buffers: Buffers) -> Batch:
    """Make a batch of chosen sequences of a pool."""
    lengths, ragged = pool.lengths[positions], pool.ragged.number[positions]
    stored = _gather_stored(pool, positions, buffers)
    offsets = buffers.get("offsets", (int(lengths.sum()), 2), np.dtype(np.int32))
    offsets[:, 0], offsets[:, 1] = stored["token/begin"], stored["token/end"]
    span_sizes = np.diff(pool.span_start)[ragged]
    spans = starts(span_sizes), pool.spans[ranges(pool.span_start[ragged], span_sizes)]
    no_words = np.zeros(len(positions) + 1, np.int64), np.empty((0, 3), np.int32)
    of_chats = pool.features.messages and not pool.view
    words, messages = (no_words, spans) if of_chats else (spans, None)
    prefix, level = f"view{pool.view}", pool.features.level
    hidden = {
        name: HiddenBatch(
            {key: stored[f"{prefix}/hidden/{name}/{key}"] for key in level.hidden.names},
            *calibration[name],
            level.hidden,
        )
        for name in pool.hidden
    }

    def attention(name: str) -> Any:
        return level.attention.from_codes(stored[f"{prefix}/attention/{name}/values"])

    return Batch(
        index=pool.index[positions],
        start=starts(lengths),
        token_ids=as_ids(stored["token/id"]),
        offsets=offsets,
        special=stored["token/special"],
        document=pool.document[ragged],
        spans_start=words[0],
        spans=words[1],
        hidden=LazyMap(tuple(hidden), hidden.__getitem__, "hidden state"),
        logits=_logits(pool, ragged, lengths, stored) if pool.logits else None,
        attention=LazyMap(pool.attention, attention, "attention map"),
        stored=stored,
        level=level,
        load_texts=lambda: [pool.texts[sequence] for sequence in ragged.tolist()],
        labels=stored.get("sequence/label"),
        tags=stored.get("token/tag"),
        class_logits=stored.get(f"{prefix}/classes/values"),
        tag_logits=stored.get(f"{prefix}/tags/values"),
        load_embedding=lambda: _vectors(pool.features, stored),
        learnt=learnt_tokens(stored.get(CONTEXT), stored.get(LEARN), lengths),
        messages=messages,
    )


def _vectors(features: Features, stored: Mapping[str, Array]) -> Floats | None:
    """Decode the text vectors among the stored arrays; None if they were not read."""
    spec, codec = features.embedding, features.level.embedding
    if spec is None or f"{EMBEDDING}/{codec.names[0]}" not in stored:
        return None
    vectors: Floats = codec.decode(
        {k: stored[f"{EMBEDDING}/{k}"] for k in codec.names}, (spec.width,)
    )
    return vectors


def gather_maps(whole: Array, begin: Array, lengths: Array, out: Array) -> None:
    """Copy maps of L^2 entries, which start at `begin` in `whole`, one after another into `out`."""
    # Neighbours of equal length are copied at once.
    edges = np.flatnonzero(np.diff(lengths, prepend=0, append=0))
    offset = 0
    for left, right in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        size, count = int(lengths[left]) ** 2, right - left
        # A window of L^2 entries at each position, without a copy: one index takes all maps of a
        # length.
        windows = np.ndarray(  # noqa: TID251  made, not annotated
            (len(whole) - size + 1, size), whole.dtype, whole, strides=whole.strides * 2
        )
        out[offset : offset + size * count].reshape(count, size)[...] = windows[begin[left:right]]
        offset += size * count


def _logits(pool: Pool, ragged: Array, lengths: Array, stored: dict[str, Array]) -> Logits:
    draw_start, draws = None, np.empty(0, np.int64)
    if pool.draw_start is not None:
        rows = ranges(pool.ragged.token_start[ragged], lengths)
        sizes = np.diff(pool.draw_start)[rows]
        draw_start, draws = starts(sizes), ranges(pool.draw_start[rows], sizes)

    def read(key: str) -> Array:
        if key in pool.draws:
            return pool.draws[key][draws]
        return stored[f"view{pool.view}/logits/{key}"]

    return decode_logits(pool.features, read, draw_start)
