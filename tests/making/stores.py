"""Stores of random but realistic data, and the values that were written into them."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from teachonce.store import EmbeddingSpec, Features, LogitsSpec, Sequences, StoreWriter, TaskSpec
from teachonce.store.format.features import ROLES, TASKS, UNLISTED_ROLE
from teachonce.store.format.sequences import SEPARATOR
from teachonce.support.arrays import Array

# The types of the fixtures `made` and `copy` of tests/store.
Made = Callable[..., Any]
Copy = Callable[..., Path]

TEXT = "the story of a Нева river, ξένος and 東京 was told; no один knows 🙂 why it ended so"
WORDS = TEXT.split(" ")
IDENTITY = {
    "teacher": {"id": "tiny", "revision": "1", "weights_hash": "ab"},
    "corpus": {"hash": "c"},
}
LABELS = ("dull", "bright", "надо", "[x]")
SOFTWARE = {"teachonce": "0.1"}


def features_of(codec: str = "default", tier: str | None = "topk", views: int = 2) -> Features:
    """Return the features of a tier or of a task: a task name (store of a fine-tuned teacher),
    `pairs` (a teacher that classified pairs of texts), `embedding` (texts with a prompt and a
    vector each), `next-topk` and `next-sample` (a causal teacher), `ranked-topk` (ranked ids), or
    `chat` (messages, and tokens that are excluded from training)."""
    sizes = {"topk": 5, "sample": 12, "head": 20}
    task = TaskSpec(tier, LABELS) if tier in TASKS else None
    if tier == "pairs":
        task = TaskSpec("classification", LABELS, separator=SEPARATOR)
    vector = EmbeddingSpec(33, "mean", "the story ", True) if tier == "embedding" else None
    chat = tier == "chat"
    tier = "next-topk" if chat else tier
    logits = None
    if tier is not None and not task and not vector:
        word, _, kind = tier.rpartition("-")
        causal, ranked = word == "next", word == "ranked"
        logits = LogitsSpec(kind, sizes[kind], next_token=causal, observed=causal, ranked=ranked)
    return Features(
        views=views, max_length=64, width=37, vocabulary=1000, codec=codec,
        hidden=("mean", "groups2.1"), attention=("mean",), logits=logits, task=task,
        embedding=vector, context=chat, learn=chat, messages=chat,
    )  # fmt: skip


SMALL = replace(features_of(), hidden=("mean",), attention=(), views=1)


@dataclass
class Part:
    """Everything that is written into one part."""

    texts: list[str]
    token_counts: Array
    document: Array
    token_ids: Array
    offsets: Array
    special: Array
    spans: dict[int, list[Array]]
    hidden: dict[tuple[int, str], Array] = field(default_factory=dict)
    logits: dict[int, dict[str, Array]] = field(default_factory=dict)
    attention: dict[tuple[int, str], list[Array]] = field(default_factory=dict)
    gold: Array | None = None
    task: dict[int, Array] = field(default_factory=dict)
    vectors: Array | None = None
    context: Array | None = None
    learn: Array | None = None
    messages: list[Array] | None = None
    document_begin: Array | None = None
    hard_cut: Array | None = None


def _pieces() -> dict[str, int]:
    """Split each word after its fourth letter into WordPieces: ids from 10; 2 and 3 are special."""
    words = dict.fromkeys(word[:4] for word in WORDS)
    ends = dict.fromkeys(f"##{word[4:]}" for word in WORDS if word[4:])
    return {"[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {
        piece: 10 + 7 * number for number, piece in enumerate([*words, *ends])
    }


PIECES = _pieces()
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": PIECES,
        },
    }
).encode()


def _tokens(text: str, offset: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids and spans of a text or a pair of texts; spans count characters from `offset`."""
    first, pair, second = text.partition(SEPARATOR)
    if pair:
        left, right = _tokens(first), _tokens(second, len(first) + 1)
        return left[0] + right[0][1:], left[1] + right[1][1:]
    ids, spans = [2], [(0, 0)]
    for word in text.split(" "):
        cut = min(len(word), 4)
        for begin, end in ((0, cut), (cut, len(word))):
            if begin < end:
                ids.append(PIECES["##" * (begin > 0) + word[begin:end]])
                spans.append((offset + begin, offset + end))
        offset += len(word) + 1
    return [*ids, 3], [*spans, (0, 0)]


def make_part(features: Features, seed: int, sequences: int = 12) -> Part:
    """Return a copy for each caller, because the caller may change it."""
    return copy.deepcopy(_made_part(replace(features, codec="default", form=0), seed, sequences))


@lru_cache(64)
def _made_part(features: Features, seed: int, sequences: int) -> Part:
    """Make a part. The result is cached: it takes a third of the time of a small store, and codecs
    and containers share it."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(sequences)]
    if features.separator is not None:
        texts = [text.replace(" ", SEPARATOR, 1) if " " in text else text + SEPARATOR
                 for text in texts]  # fmt: skip
    if features.embedding:
        texts = [features.embedding.prompt + text for text in texts]
    tokens = [_tokens(text) for text in texts]
    counts = np.array([len(ids) for ids, _ in tokens])
    total = int(counts.sum())
    ids = np.concatenate([ids for ids, _ in tokens])
    offsets = np.concatenate([spans for _, spans in tokens]).astype(np.int32)
    spans = {}
    for view in range(1, features.views):
        spans[view] = [_mask(text, rng) for text in texts]
    part = Part(texts, counts, np.arange(sequences) // 2, ids, offsets, (ids < 10), spans)
    if features.embedding:
        raw = rng.normal(size=(sequences, features.embedding.width))
        part.vectors = (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)
    if features.context:
        part.context = rng.integers(0, counts)
    if features.learn:
        part.learn = rng.random(total) < 0.7
    if features.messages:
        # Not from `rng`: without messages, the values of a part must equal those in the golden
        # stores.
        message_rng = np.random.default_rng(seed)
        part.messages = [_mask(text, message_rng) for text in texts]
        for rows in part.messages:
            rows[:, 2] = message_rng.choice([0, 3, len(ROLES) - 1, UNLISTED_ROLE], len(rows))
    for view in range(features.views):
        for name in features.hidden:
            states = rng.normal(size=(total, features.width)) * channel_scale(features.width)
            states[rng.random(total) < 0.01] *= 6
            part.hidden[view, name] = states.astype(np.float32)
        if features.logits:
            part.logits[view] = _logits(features, ids, counts, rng)
        if features.task:
            size = total if features.task.kind == "tagging" else sequences
            part.task[view] = rng.normal(size=(size, len(LABELS)), scale=5).astype(np.float32)
            part.gold = rng.integers(-1, len(LABELS), size)
            part.gold[part.special if size == total else []] = -1
        for name in features.attention:
            part.attention[view, name] = [
                rng.dirichlet(np.full(n, 0.3), size=n).astype(np.float32) for n in counts
            ]
    return part


def channel_scale(width: int) -> Array:
    scale = np.linspace(0.5, 2, width)
    scale[3 % width] = 40
    return scale


def _mask(text: str, rng: np.random.Generator) -> Array:
    rows, offset = [], 0
    for word in text.replace(SEPARATOR, " ").split(" "):
        if rng.random() < 0.3:
            rows.append((offset, offset + len(word), int(rng.integers(0, 3))))
        offset += len(word) + 1
    return np.array(rows, np.int32).reshape(-1, 3)


def _logits(
    features: Features, token_ids: Array, counts: Array, rng: np.random.Generator
) -> dict[str, Array]:
    assert features.logits
    tokens = len(token_ids)
    raw = rng.normal(size=(tokens, features.vocabulary)) * 3
    if features.logits.observed:  # often among the best, as with a real teacher
        raw[np.arange(tokens), np.roll(token_ids, -1)] += 6
    partition = np.log(np.exp(raw).sum(axis=1)).astype(np.float32)
    logits = _of_tier(features, raw, partition, rng)
    if features.logits.observed:
        observed = raw[np.arange(tokens), np.roll(token_ids, -1)] - partition
        observed[np.cumsum(counts) - 1] = -np.inf
        logits["observed"] = observed.astype(np.float32)
    return logits


def _of_tier(
    features: Features, raw: Array, partition: Array, rng: np.random.Generator
) -> dict[str, Array]:
    assert features.logits
    tier, size, tokens = features.logits.tier, features.logits.size, len(raw)
    if tier == "topk":
        ids = np.argsort(-raw, axis=1)[:, :size]
        logs = (np.take_along_axis(raw, ids, axis=1) - partition[:, None]).astype(np.float32)
        rest = np.log1p(-np.exp(logs).sum(axis=1)).astype(np.float32)
        return {"ids": ids, "logprobs": logs, "rest": rest, "log_partition": partition}
    if tier == "sample":
        draws = rng.zipf(1.5, size=(tokens, size)) % features.vocabulary
        return {"draws": draws, "log_partition": partition}
    values = rng.normal(size=(tokens, size)).astype(np.float32)
    return {"values": values, "log_partition": partition}


def calibration_of(features: Features) -> dict[str, tuple[Array, Array]]:
    scale = channel_scale(features.width).astype(np.float32)
    return {name: (np.linspace(-1, 1, features.width).astype(np.float32), scale)
            for name in features.hidden}  # fmt: skip


def begin(path: Path | str, features: Features, **changes: Any) -> StoreWriter:
    head = None
    if features.logits and features.logits.tier == "head":
        rng = np.random.default_rng(9)
        size = (features.vocabulary, features.logits.size)
        head = (rng.normal(size=size), np.zeros(features.vocabulary))
    arguments: dict[str, Any] = {"identity": IDENTITY, "features": features, "software": SOFTWARE}
    arguments |= {
        "calibration": calibration_of(features),
        "files": {"tokenizer.json": TOKENIZER, "config.json": b"{}"},
        "weights": {"embeddings.word_embeddings.weight": np.eye(8, 4), "pooler.bias": np.ones(4)},
        "head": head,
        "extras": (),
    }
    return StoreWriter.create_or_resume(path, **(arguments | changes))


def put_part(writer: StoreWriter, number: int, part: Part, seed: int = 0) -> None:
    """Add the rows in random order, in a few pieces, as batches sorted by length do."""
    rng = np.random.default_rng(seed)
    w = writer.part(number, part.token_counts)
    zeros = np.zeros(len(part.texts), np.int64)
    begins = zeros + 7 if part.document_begin is None else part.document_begin
    cuts = zeros > 0 if part.hard_cut is None else part.hard_cut
    sequences = Sequences(
        part.texts, part.document, begins, cuts, part.token_ids, part.offsets, part.special,
        part.gold, part.context, part.learn, part.messages,
    )  # fmt: skip
    w.set_sequences(sequences)
    for view, spans in part.spans.items():
        w.set_masks(view, spans)
    for rows in np.array_split(rng.permutation(len(part.token_ids)), 3):
        for (view, name), states in part.hidden.items():
            w.put_hidden(view, name, rows, states[rows])
        for view, logits in part.logits.items():
            w.put_logits(view, rows, {name: array[rows] for name, array in logits.items()})
    for view, outputs in part.task.items():
        for rows in np.array_split(rng.permutation(len(outputs)), 2):
            w.put_task(view, rows, outputs[rows])
    for (view, name), maps in part.attention.items():
        for sequence in rng.permutation(len(maps)):
            w.put_attention(view, name, int(sequence), maps[sequence])
    if part.vectors is not None:
        for rows in np.array_split(rng.permutation(len(part.vectors)), 2):
            w.put_embedding(rows, part.vectors[rows])
    writer.publish(w)


def make_store(
    path: Path | str, features: Features, parts: int = 3, sequences: int = 12, **changes: Any
) -> list[Part]:
    """Make a sealed store, in which some parts may exist already; return the values written."""
    writer = begin(path, features, **changes)
    written = [make_part(features, seed, sequences) for seed in range(parts)]
    for number, part in enumerate(written):
        if number not in writer.published:
            put_part(writer, number, part)
    writer.seal()
    return written


def unfinished(path: Path | str, features: Features, parts: int = 1) -> None:
    """Make a store whose writer stopped after the first parts."""
    writer = begin(path, features)
    for number in range(parts):
        put_part(writer, number, make_part(features, number))
    writer.close()


def copied(source: Path, target: Path) -> Path:
    """Copy a store of files or of one file."""
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, target))


def stores_in(folder: Path, **sizes: int) -> Callable[..., tuple[Path, list[Part]]]:
    """Return a function of container, codec and tier that makes each store once."""

    @cache
    def make_once(ext: str, codec: str, tier: str) -> tuple[Path, list[Part]]:
        path = folder / f"{codec}-{tier}.{ext}"
        return path, make_store(path, features_of(codec, tier), **sizes)

    def make(ext: str, codec: str = "default", tier: str = "topk") -> tuple[Path, list[Part]]:
        # `cache` would treat a default and the same value given explicitly as different calls
        return make_once(ext, codec, tier)

    return make
