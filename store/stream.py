"""Stream: pools of blocks are read slice by slice, then gathered into batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from store import codecs, order
from store.codecs import Floats
from store.errors import StoreError
from store.pool import Buffers, Pool, ranges
from store.record import LazyMap, Logits, as_ids, decode_logits
from store.sequences import masked_tokens
from store.tree import Array

if TYPE_CHECKING:
    from store.reader import FeatureStore

KINDS = ("hidden", "logits", "attention")
SPAN_BASE = np.int64(2**32)


@dataclass(frozen=True)
class HiddenBatch:
    """Hidden states of N tokens as stored, with what decodes them.

    values float32 [N, D] raw states with scale None (codec exact); int8 [N, D] with scale
    float16 [N] (default); packed int4 uint8 [N, ceil(D/2)] with scale [N, ceil(D/32)] (small).
    mean, deviation float32 [D] are the store's calibration.
    """

    values: Array
    scale: Array | None
    mean: Floats
    deviation: Floats

    def normalised(self) -> Floats:
        """float32 [N, D]: (state - mean) / deviation."""
        if self.scale is None:
            return np.asarray((self.values - self.mean) / self.deviation, np.float32)
        return codecs.decode_scaled(self.values, self.scale, len(self.mean))

    def states(self) -> Floats:
        """float32 [N, D]: raw states."""
        if self.scale is None:
            return self.values
        states = self.normalised()
        states *= self.deviation
        states += self.mean
        return states


@dataclass(frozen=True)
class Batch:
    """B sequences, N tokens, flat. Arrays are valid until the next batch.

    index int64 [B], start int64 [B + 1], token_ids int32 [N], offsets int32 [N, 2],
    special bool [N], document int64 [B], mask bool [N] (tokens of masked words),
    spans_start int64 [B + 1], spans int32 [M, 3]. logits None if the store has none or they were
    not asked for; attention[name] float32 [sum L^2], row-major maps one after another.
    """

    index: Array
    start: Array
    token_ids: Array
    offsets: Array
    special: Array
    texts: list[str]
    document: Array
    mask: Array
    spans_start: Array
    spans: Array
    hidden: Mapping[str, HiddenBatch]
    logits: Logits | None
    attention: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.index)


def stream(
    store: FeatureStore,
    seed: int,
    epoch: int,
    batch_tokens: int,
    view: int,
    blocks: Array | None,
    features: tuple[str, ...] | None,
    shuffle: bool,
    pool_blocks: int,
    skip: int,
) -> Iterator[Batch]:
    """See `FeatureStore.stream`."""
    kinds = KINDS if features is None else tuple(features)
    if not set(kinds) <= set(KINDS):
        raise StoreError(f"stream: features must be of {', '.join(KINDS)}, got {features!r}")
    if not 0 <= view < store.features.views:
        raise StoreError(f"{store.path}: no view {view}; it has 0..{store.features.views - 1}")
    if batch_tokens < 1 or pool_blocks < 1 or skip < 0 or seed < 0 or epoch < 0:
        raise StoreError(
            "stream: batch_tokens and pool_blocks must be over 0; skip, seed and epoch at least 0"
        )
    rows = store.blocks() if blocks is None else store.check_blocks(blocks)
    if shuffle:
        rows = rows[order.order_blocks(store.part_of(rows[:, 0]), seed, epoch)]
    return _batches(store, seed, epoch, batch_tokens, view, rows, kinds, shuffle, pool_blocks, skip)


def _batches(
    store: FeatureStore,
    seed: int,
    epoch: int,
    batch_tokens: int,
    view: int,
    rows: Array,
    kinds: tuple[str, ...],
    shuffle: bool,
    pool_blocks: int,
    skip: int,
) -> Iterator[Batch]:
    pool_buffers, buffers = Buffers(), Buffers()
    plan = _plan(store, seed, epoch, batch_tokens, rows, shuffle, pool_blocks)
    for taken, lengths, chosen in plan:
        if skip >= len(chosen):
            skip -= len(chosen)
            continue
        pool = Pool(store, taken, lengths, view, kinds, pool_buffers)
        for sequences in chosen[skip:]:
            yield _gather(store, pool, sequences, buffers)
        skip = 0


def _plan(
    store: FeatureStore,
    seed: int,
    epoch: int,
    batch_tokens: int,
    rows: Array,
    shuffle: bool,
    pool_blocks: int,
) -> Iterator[tuple[Array, Array, list[Array]]]:
    """For each pool its blocks, the lengths of its sequences, and its batches of these."""
    for number, first in enumerate(range(0, len(rows), pool_blocks)):
        taken = rows[first : first + pool_blocks]
        lengths = np.concatenate([store.lengths(int(b), int(e)) for b, e in taken])
        if shuffle:
            yield taken, lengths, order.shuffled_batches(lengths, batch_tokens, seed, epoch, number)
        else:
            yield taken, lengths, order.plain_batches(lengths, batch_tokens)


def batch_count(
    store: FeatureStore, seed: int, epoch: int, batch_tokens: int, rows: Array, pool_blocks: int
) -> int:
    """See `FeatureStore.batch_count`."""
    rows = rows[order.order_blocks(store.part_of(rows[:, 0]), seed, epoch)]
    plan = _plan(store, seed, epoch, batch_tokens, rows, True, pool_blocks)
    return sum(len(chosen) for _, _, chosen in plan)


def _gather(store: FeatureStore, pool: Pool, chosen: Array, buffers: Buffers) -> Batch:
    lengths = pool.lengths[chosen]
    start = np.concatenate([[0], np.cumsum(lengths)])
    rows = ranges(pool.token_start[chosen], lengths)

    def take(name: str) -> Array:
        whole = pool.token[name]
        out = buffers.get(name, (len(rows), *whole.shape[1:]), whole.dtype)
        np.take(whole, rows, axis=0, out=out, mode="clip")
        return out

    offsets = buffers.get("offsets", (len(rows), 2), np.dtype(np.int32))
    offsets[:, 0], offsets[:, 1] = take("token/begin"), take("token/end")
    span_sizes = np.diff(pool.span_start)[chosen]
    spans = pool.spans[ranges(pool.span_start[chosen], span_sizes)]
    token_base = np.repeat(np.arange(len(chosen)), lengths) * SPAN_BASE
    span_base = np.repeat(np.arange(len(chosen)), span_sizes) * SPAN_BASE
    mask = masked_tokens(
        offsets[:, 0] + token_base, offsets[:, 1] + token_base,
        spans[:, 0] + span_base, spans[:, 1] + span_base,
    )  # fmt: skip
    here = f"view{pool.view}"
    logits, hidden = None, {}
    if pool.has_logits:
        draw_start, draws = None, np.empty(0, np.int64)
        if pool.draw_start is not None:
            sizes = np.diff(pool.draw_start)[rows]
            draw_start = np.concatenate([[0], np.cumsum(sizes)])
            draws = ranges(pool.draw_start[rows], sizes)

        def read(key: str) -> Array | None:
            if key in pool.draws:
                return pool.draws[key][draws]
            name = f"{here}/logits/{key}"
            return take(name) if name in pool.token else None

        logits = decode_logits(store.features, read, draw_start)
    for name in pool.hidden:
        scale = f"{here}/hidden/{name}/scale"
        hidden[name] = HiddenBatch(
            take(f"{here}/hidden/{name}/values"),
            take(scale) if scale in pool.token else None,
            *store.calibration[name],
        )
    attention = {}
    for name, whole in pool.attention.items():
        codes = buffers.get(f"attention/{name}", (int((lengths**2).sum()),), whole.dtype)
        place = 0
        for sequence in chosen.tolist():
            begin, end = pool.square_start[sequence], pool.square_start[sequence + 1]
            codes[place : place + end - begin] = whole[begin:end]
            place += end - begin
        attention[name] = codecs.decode_attention(codes)
    return Batch(
        index=pool.index[chosen],
        start=start,
        token_ids=as_ids(take("token/id")),
        offsets=offsets,
        special=take("token/special"),
        texts=[pool.texts[sequence] for sequence in chosen.tolist()],
        document=pool.document[chosen],
        mask=mask,
        spans_start=np.concatenate([[0], np.cumsum(span_sizes)]),
        spans=spans,
        hidden=LazyMap(tuple(hidden), hidden.__getitem__, "hidden state"),
        logits=logits,
        attention=LazyMap(tuple(attention), attention.__getitem__, "attention map"),
    )
