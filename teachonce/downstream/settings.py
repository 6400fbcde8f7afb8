"""The settings of each kind of work; ranges and choices are those of the command's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.downstream.options import OPTIONS
from teachonce.support.options import KEY, check_values
from teachonce.training.optimizer import check_optimizer


def _taken(name: str, default: Any = None) -> Any:
    """A field of settings: an option of `Asked` with a default."""
    return dataclasses.field(default=default, metadata={KEY: OPTIONS[name]})


@dataclass(frozen=True)
class MlmSettings:
    """Everything that decides a masked-LM run. `steps` wins over `epochs`.

    Raises UserError for a value that the command line refuses.
    """

    model: str
    train: Sequence[Path]
    out: Path
    dev: Path | None = None
    steps: int | None = _taken("steps")
    epochs: float = _taken("epochs", 1.0)
    batch_size: int = _taken("batch_size", 32)
    lr: float | None = _taken("lr")
    seed: int = _taken("seed", 0)
    max_length: int = _taken("max_length", 128)
    vocab: str = _taken("vocab", "30k")
    mask_prob: float = _taken("mask_prob", 0.15)
    evaluate_every: int = _taken("evaluate_every", 500)
    precision: str = _taken("precision", "fp32")
    resume: bool = _taken("resume", False)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class FineTuneSettings:
    """How a checkpoint is fine-tuned. The best epoch is chosen on dev.

    steps: optimiser steps instead of `epochs`; the last epoch may be shorter than the others.
    accumulate: batches of one step, whose gradient is the mean over them.
    lr: None for that of `fine_tune.default_lr`, with adadelta 1.
    warmup: share of the steps in which the rate rises; after them it falls linearly to 0.
    max_length: None for that of the task; it is cut to what the model takes.
    limit: number of training examples, the first ones; None for all.

    Raises UserError for a value that the command line refuses.
    """

    epochs: int = _taken("epochs", 3)
    steps: int | None = _taken("steps")
    batch_size: int = _taken("batch_size", 16)
    accumulate: int = _taken("accumulate", 1)
    optimizer: str = _taken("optimizer", "adamw")
    lr: float | None = _taken("lr")
    warmup: float = _taken("warmup", 0.1)
    max_length: int | None = _taken("max_length")
    seeds: int = _taken("seeds", 3)
    seed: int = _taken("seed", 0)
    limit: int | None = _taken("limit")
    precision: str = _taken("precision", "fp32")

    def __post_init__(self) -> None:
        check_values(self)
        check_optimizer(self.optimizer)


@dataclass(frozen=True)
class SpeedSettings:
    """What is measured. `texts` are single sentences, the first 20; without them 32 random tokens.

    Raises UserError for a value that the command line refuses.
    """

    batch_size: int = _taken("batch_size", 16)
    max_length: int = _taken("max_length", 512)
    repeat: int = _taken("repeat", 5)
    seed: int = _taken("seed", 0)
    texts: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class SearchSettings:
    """How models rank documents.

    documents_by: the model of the documents, None for that of the queries.
    teacher: the model whose own ranking is compared with.
    candidates, candidates_by: of rerank, who names the documents to rank; one of both.
    depth: candidates of a query.
    max_length: tokens at which texts are cut, None for what each model's folder says.

    Raises UserError for a value that the command line refuses.
    """

    documents_by: str | None = _taken("documents_by")
    teacher: str | None = _taken("teacher")
    candidates: Path | None = _taken("candidates")
    candidates_by: str | None = _taken("candidates_by")
    depth: int = _taken("depth", 100)
    max_length: int | None = _taken("max_length")

    def __post_init__(self) -> None:
        check_values(self)

    def told(self) -> str:
        """Say what else but the model decides a ranking, for tables; "" for nothing."""
        if self.documents_by:
            return f"documents by {self.documents_by}"
        first = self.candidates_by or self.candidates
        return f"of the {self.depth} best by {first}" if first else ""

    def as_words(self) -> dict[str, Any]:
        """Return the settings for scores.json."""
        found = dataclasses.asdict(self)
        return {**found, "candidates": str(self.candidates) if self.candidates else None}


KINDS = {
    "mlm": MlmSettings,
    "fine-tuning": FineTuneSettings,
    "speed": SpeedSettings,
    "rerank": SearchSettings,
}
"""The settings of each kind of work, by its name in --help."""
