"""Measures of a model: how it orders pairs of sentences, how large it is, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from support.arrays import Array
from teacher_dump.windows.length_batches import length_batches

BATCH_TOKENS = 2048
PASSES = 2  # the faster one counts: the first also pays for warming up


@dataclass(frozen=True)
class Encoded:
    """Sentence vectors float32 [B,D] of one model, and how many sentences it encoded in a
    second."""

    vectors: Array
    sentences_per_second: float


@dataclass(frozen=True)
class Model:
    """One row of the comparison. `agreement` is the rank correlation with the teacher's
    similarities."""

    name: str
    parameters: int
    megabytes: float
    sentences_per_second: float
    similarities: Array
    agreement: float
    mlm: float | None = None  # held-out masked-LM loss, nats a token


@dataclass(frozen=True)
class Comparison:
    """All that is printed and drawn; `curves` holds the rows of each student's metrics.jsonl."""

    models: list[Model]  # the teacher first
    curves: dict[str, list[dict[str, float]]]
    sentences: int


def encode(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], max_length: int, name: str
) -> Encoded:
    """Vectors of B texts, timed with everything from text to vector; `name` labels the progress."""
    seconds = []
    with tqdm(total=PASSES * len(texts), desc=name, unit="text", disable=None) as progress:
        for _ in range(PASSES):
            begun = time.perf_counter()
            vectors = _vectors(model, tokenizer, texts, max_length, progress)
            seconds.append(time.perf_counter() - begun)
    return Encoded(vectors, len(texts) / min(seconds))


@torch.inference_mode()
def _vectors(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], max_length: int, progress: Any
) -> Array:
    rows = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    found: list[tuple[Array, Tensor]] = []
    for batch in length_batches([len(row) for row in rows], BATCH_TOKENS):
        padded = tokenizer.pad({"input_ids": [rows[i] for i in batch]}, return_tensors="pt")
        output = model(**padded, output_hidden_states=True)
        found.append((batch, sentence_vectors(output.hidden_states, padded["attention_mask"])))
        progress.update(len(batch))
    order = np.concatenate([batch for batch, _ in found])
    return torch.cat([vectors for _, vectors in found]).numpy()[np.argsort(order)]


def sentence_vectors(states: Sequence[Tensor], present: Tensor) -> Tensor:
    """Mean [B,D] over all layers but the embeddings (`states[0]`), then over the tokens that are
    `present` [B,L]."""
    mean = torch.stack(list(states[1:])).mean(dim=0)
    weight = present[:, :, None].to(mean.dtype)
    return (mean * weight).sum(dim=1) / weight.sum(dim=1)


def similarities(vectors: Array) -> Array:
    """Cosine of every pair of B sentences, float64 [B(B-1)/2], after the mean vector of all of
    them is taken off.

    What all vectors of an encoder have in common says nothing about a sentence, yet rules the plain
    cosine (Mu & Viswanath 2018, section 3.1).
    """
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    first, second = np.triu_indices(len(vectors), 1)
    found: Array = (centred @ centred.T)[first, second]
    return found


def spearman(one: Array, other: Array) -> float:
    """Rank correlation of two lists of similarities."""
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)
