"""Measures how much of tagging a linear map can read off frozen features of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel

from teachonce.checkpoints.loading import load_config, load_network, load_tokenizer
from teachonce.checkpoints.names import resolve_model
from teachonce.downstream.tasks.tagged_sentences import Sentence, first_pieces, read_tagged
from teachonce.support.arrays import Floats
from teachonce.support.errors import UserError


def linear_probe(
    model: str,
    train: Path,
    dev: Path,
    *,
    train_sentences: int = 1000,
    dev_sentences: int = 1000,
    max_length: int = 128,
    batch_size: int = 32,
    seed: int = 0,
) -> dict[str, float]:
    """Fit a logistic regression on frozen features; return its accuracy and macro F1 on dev.

    The feature of a word is its first piece's mean over the layers, standardised. `train` and
    `dev` are word<TAB>tag files, of which the first `train_sentences` and `dev_sentences` are read.
    Words without a piece are left out on both sides; `lost` is their share of the dev words.

    Raises UserError on a wrong model or file.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    resolved = resolve_model(model)
    load_config(resolved)
    tokenizer = load_tokenizer(resolved)
    encoder = load_network(AutoModel, resolved, dtype=torch.float32)[0].eval()

    def features(sentences: Sequence[Sentence]) -> tuple[Floats, list[str]]:
        return word_features(encoder, tokenizer, sentences, max_length, batch_size)

    dev_rows = read_tagged(dev)[:dev_sentences]
    x, y = features(read_tagged(train)[:train_sentences])
    if len(set(y)) < 2:
        raise UserError(f"tags {train}: {len(set(y))} different tags, a probe needs two or more")
    dev_x, dev_y = features(dev_rows)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, random_state=seed))
    found = probe.fit(x, y).predict(dev_x)
    words = sum(len(row.words) for row in dev_rows)
    labels = sorted(set(dev_y))
    return {
        "accuracy": float(np.mean(found == np.array(dev_y))),
        "macro_f1": float(f1_score(dev_y, found, labels=labels, average="macro", zero_division=0)),
        "lost": 1 - len(dev_y) / words,
    }


@torch.inference_mode()
def word_features(
    encoder: Any,
    tokenizer: Any,
    sentences: Sequence[Sentence],
    max_length: int,
    batch_size: int,
) -> tuple[Floats, list[str]]:
    """Return features [words, D] of the words that have a piece, and their tags."""
    limit = min(max_length, tokenizer.model_max_length)
    pad = tokenizer.pad_token_id or 0
    rows, tags = [], []
    for begin in tqdm(
        range(0, len(sentences), batch_size), desc="features", unit="batch", disable=None
    ):
        some = sentences[begin : begin + batch_size]
        pieces = [first_pieces(tokenizer, sentence.words, limit) for sentence in some]
        longest = max(len(ids) for ids, _ in pieces)
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in pieces])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row, _ in pieces])
        states = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        mean = torch.stack(states.hidden_states[1:]).mean(0)  # without the embeddings' output
        for row, ((_, first), sentence) in enumerate(zip(pieces, some, strict=True)):
            kept = [index for index, position in enumerate(first) if position >= 0]
            rows.append(mean[row, [first[index] for index in kept]].numpy())
            tags += [sentence.tags[index] for index in kept]
    return np.concatenate(rows), tags
