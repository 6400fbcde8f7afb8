"""Students of sentence embeddings that others make of the same teacher: Model2Vec, and
sentence-transformers' own distillation."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from teachonce.checkpoints.names import resolve_model
from teachonce.store import open_store

WIDTHS = (64, 128, 256)
"""Of Model2Vec's students, which have the teacher's own pieces."""

WORDS = 10_000
"""Words of the text, the most frequent ones, that one of Model2Vec's students has as well."""

LAYERS = (1, 4)
"""Layers of the teacher, from 0, as in sentence-transformers' own example of distillation."""

EPOCHS = 0.5
"""Of sentence-transformers' distillation: half of one takes 38 minutes of a core."""

Making = Callable[[Path], object]


def peers(model: str, store: Path) -> dict[str, Making]:
    """Return a function for each peer whose library is installed, by its name."""
    makers: dict[str, Making] = {}
    if find_spec("skeletoken"):  # of model2vec[distill]
        makers = {f"Model2Vec {width}": partial(by_model2vec, model, width) for width in WIDTHS}
        with_words = partial(by_model2vec, model, 128, store=store)
        makers[f"Model2Vec 128, {WORDS:,} words of the text"] = with_words
    layers = ", ".join(str(layer + 1) for layer in LAYERS)
    name = f"sentence-transformers, layers {layers} of the teacher, {EPOCHS:g} epochs"
    return {**makers, name: partial(by_sentence_transformers, model, store)}


def made(make: Making, out: Path) -> float:
    """Make a peer unless it exists; return the minutes."""
    minutes = out / "minutes"
    if not minutes.exists():
        started = time.perf_counter()
        make(out)
        minutes.write_text(str((time.perf_counter() - started) / 60))
    return float(minutes.read_text())


def frequent_words(store: Path) -> list[str]:
    """Return the most frequent words of a store's texts."""
    counts = Counter[str]()
    for text in open_store(store).texts():
        counts.update(re.findall(r"[a-z]{2,}", text.lower()))
    return [word for word, _ in counts.most_common(WORDS)]


def by_model2vec(model: str, width: int, out: Path, store: Path | None = None) -> None:
    """Distil by Model2Vec: the teacher's vector of each piece, and of each word of a store that is
    frequent there."""
    from model2vec.distill import distill

    words = frequent_words(store) if store else None
    distill(folder_of(model), vocabulary=words, pca_dims=width).save_pretrained(out)


def by_sentence_transformers(model: str, store: Path, out: Path) -> None:
    """Train some of the teacher's layers, with all of its pieces, with EmbedDistillLoss on the
    stored vectors."""
    import torch
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import EmbedDistillLoss

    rows = open_store(store).to_datasets(columns=["text", "embedding"])
    student = SentenceTransformer(folder_of(model), device="cpu")
    network: Any = student[0].auto_model
    network.encoder.layer = torch.nn.ModuleList(network.encoder.layer[layer] for layer in LAYERS)
    network.config.num_hidden_layers = len(LAYERS)
    arguments = SentenceTransformerTrainingArguments(
        str(out / "run"), num_train_epochs=EPOCHS, per_device_train_batch_size=128,
        learning_rate=1e-4, warmup_steps=100, use_cpu=True, bf16=True, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    loss = EmbedDistillLoss(student, distance_metric="cosine")
    labelled = rows.rename_column("embedding", "label")
    SentenceTransformerTrainer(student, arguments, labelled, loss=loss).train()
    student.save_pretrained(str(out))


def folder_of(model: str) -> str:
    """Return the folder or the id of a teacher that may be an alias."""
    resolved = resolve_model(model)
    return str(resolved.root or resolved.path_or_id)
