"""Stores of random but realistic features, for measurements that need size and no teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from teachonce.store import Features, LogitsSpec, PartWriter, Sequences, StoreWriter
from teachonce.support.arrays import Array

VOCABULARY, MAX_LENGTH = 30522, 256
# Of the lengths: log-normal, as windows of a real corpus; sum L^2 / sum L is 53.
MEDIAN, SPREAD = 21, 0.79
PART_TOKENS, PIECE = 131_072, 8192
WORDS = [
    f"{a}{b}{c}"
    for a in ("st", "wo", "ri", "lan", "é")
    for b in "aeiou"
    for c in ("n", "rd", "th", "sser")
]


def features_of(width: int, kept: int, codec: str = "default") -> Features:
    """Return features of one view: a hidden state, an attention map, the `kept` best logits."""
    return Features(
        views=1, max_length=MAX_LENGTH, width=width, vocabulary=VOCABULARY, codec=codec,
        hidden=("mean",), attention=("mean",), logits=LogitsSpec("topk", kept, ranked=True),
    )  # fmt: skip


def make_store(path: Path, tokens: int, features: Features, seed: int = 0) -> None:
    """Write a sealed store of about `tokens` tokens; equal arguments give equal values."""
    scale = np.linspace(0.5, 2, features.width, dtype=np.float32)
    writer = StoreWriter.create_or_resume(
        path,
        identity={"teacher": {"id": "synthetic"}, "corpus": {"hash": str(seed)}},
        features=features,
        calibration={"mean": (np.zeros_like(scale), scale)},
    )
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(MEDIAN), SPREAD, tokens // 20 + 1))
    lengths = np.clip(np.rint(lengths), 4, features.max_length).astype(np.int64)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]
    parts = np.cumsum(lengths) // PART_TOKENS
    for number in np.unique(parts).tolist():
        counts = lengths[parts == number]
        part = writer.part(number, counts)
        _put_text(part, counts, rng)
        for rows in np.array_split(np.arange(counts.sum()), -(-counts.sum() // PIECE)):
            states = rng.standard_normal((len(rows), features.width), np.float32)
            part.put_hidden(0, "mean", rows, states * scale)
            _put_logits(part, rows, features.logits.size if features.logits else 0, rng)
        for sequence, length in enumerate(counts.tolist()):
            weights = rng.standard_gamma(0.3, (length, length), np.float32) + np.float32(1e-6)
            part.put_attention(0, "mean", sequence, weights / weights.sum(1, keepdims=True))
        writer.publish(part)
    writer.seal()


def _put_text(part: PartWriter, counts: Array, rng: np.random.Generator) -> None:
    """Add a token for each word, between two special tokens."""
    texts, offsets, special = [], [], []
    for length in counts.tolist():
        words = [WORDS[i] for i in rng.integers(0, len(WORDS), length - 2)]
        texts.append(" ".join(words))
        end = np.cumsum([len(word) + 1 for word in words]) - 1
        spans = np.zeros((length, 2), np.int32)
        spans[1:-1] = np.stack([end - [len(word) for word in words], end], axis=1)
        offsets.append(spans)
        special.append(np.arange(length) % (length - 1) == 0)
    sequences = np.arange(len(counts))
    ids = _ids((int(counts.sum()),), rng)
    content = Sequences(
        texts, sequences // 2, sequences * 0, sequences < 0, ids,
        np.concatenate(offsets), np.concatenate(special),
    )  # fmt: skip
    part.set_sequences(content)


def _ids(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Rare ids are rare: log-uniform over the vocabulary."""
    return (VOCABULARY ** rng.random(shape, np.float32)).astype(np.int64) - 1


def _different(ids: Array) -> Array:
    """Replace duplicate ids [N, K] in a row by the next free ids."""
    order, offsets = np.argsort(ids, axis=1), np.arange(ids.shape[1])
    least = np.maximum.accumulate(np.take_along_axis(ids, order, axis=1) - offsets, axis=1)
    distinct = np.empty_like(ids)
    raised = np.minimum(least, VOCABULARY - ids.shape[1]) + offsets
    np.put_along_axis(distinct, order, raised, axis=1)
    return distinct


def _put_logits(part: PartWriter, rows: Array, kept: int, rng: np.random.Generator) -> None:
    """Steeply falling logits, and some probability left over."""
    logits = -np.cumsum(rng.standard_exponential((len(rows), kept), np.float32), axis=1)
    rest = rng.standard_normal(len(rows), np.float32) - 2
    total = np.log(np.exp(logits).sum(axis=1) + np.exp(rest))
    ids = _different(_ids(logits.shape, rng))
    logprobs = {"ids": ids, "logprobs": logits - total[:, None], "rest": rest - total}
    part.put_logits(0, rows, {**logprobs, "log_partition": total + 9})
