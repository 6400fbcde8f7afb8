"""The settings of each kind of task, with the ranges and choices of the command's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teachonce.downstream.options import LARGEST_SEED, OPTIONS
from teachonce.support import files
from teachonce.support.errors import UserError
from teachonce.support.options import KEY, parse_values


def _from_option(name: str, default: Any = None) -> Any:
    """Return a dataclass field with the checks of the option `name` of `DownstreamOptions`."""
    return dataclasses.field(default=default, metadata={KEY: OPTIONS[name]})


def check_new_folder(out: Path, resumable: bool = True) -> None:
    """Raise UserError if `out` exists, unless it is a folder that is empty, or has only temporary
    files of a process that was killed. `resumable`: whether the error suggests --resume."""
    taken = files.is_taken(out)
    if taken and out.is_dir():
        taken = not all(path.name.startswith(files.UNFINISHED) for path in out.iterdir())
    if taken:
        remedy = ", or continue with --resume" if resumable else ""
        raise UserError(f"--out {out}: exists already; choose another{remedy}")


def seeds_from(first: int, count: int) -> range:
    """Return `count` seeds from `first` on. Raises UserError if the last one is too large."""
    last = first + count - 1
    if last > LARGEST_SEED:
        raise UserError(
            f"--seed {first} with --seeds {count}: the last seed would be {last}, above the"
            f" largest, {LARGEST_SEED}; lower --seed"
        )
    return range(first, first + count)


class _Checked:
    """Checks its fields. Raises UserError for a value that the command line would refuse."""

    def __post_init__(self) -> None:
        parse_values(self)


@dataclass(frozen=True)
class MlmSettings(_Checked):
    """Holds all settings of a masked-LM training. `steps` overrides `epochs`; `text_column` names
    the column of texts in tables."""

    model: str
    train: Sequence[Path]
    out: Path
    dev: Path | None = None
    steps: int | None = _from_option("steps")
    epochs: float = _from_option("epochs", 1.0)
    batch_size: int = _from_option("batch_size", 32)
    lr: float | None = _from_option("lr")
    seed: int = _from_option("seed", 0)
    max_length: int = _from_option("max_length", 128)
    vocab: str = _from_option("vocab", "30k")
    mask_prob: float = _from_option("mask_prob", 0.15)
    text_column: str | None = _from_option("text_column")
    evaluate_every: int | None = _from_option("evaluate_every")
    precision: str = _from_option("precision", "fp32")
    resume: bool = _from_option("resume", False)


@dataclass(frozen=True)
class FineTuneSettings(_Checked):
    """Holds all settings of a fine-tuning. The best epoch is chosen on dev.

    steps: number of optimizer steps, instead of `epochs`; the last epoch may be shorter than the
        others.
    accumulate: gradient accumulation: batches per step; the gradient is the mean over them.
    lr: learning rate; None for 1 with adadelta, else for `fine_tune.default_lr`.
    warmup: share of the steps in which the learning rate rises; it then falls linearly to 0.
    max_length: tokens; None for the task's default. Larger values are reduced to the model's limit.
    limit: train on the first `limit` examples; None for all.
    """

    epochs: int = _from_option("epochs", 3)
    steps: int | None = _from_option("steps")
    batch_size: int = _from_option("batch_size", 16)
    accumulate: int = _from_option("accumulate", 1)
    optimizer: str = _from_option("optimizer", "adamw")
    lr: float | None = _from_option("lr")
    warmup: float = _from_option("warmup", 0.1)
    max_length: int | None = _from_option("max_length")
    seeds: int = _from_option("seeds", 3)
    seed: int = _from_option("seed", 0)
    limit: int | None = _from_option("limit")
    precision: str = _from_option("precision", "fp32")


@dataclass(frozen=True)
class LmSettings(_Checked):
    """Holds all settings of a score of next tokens.

    max_length: tokens of a window; None for the model's limit, at most 1,024.
    stride: tokens that consecutive windows share; None for half a window.
    store: compare with the teacher of this store; None for no comparison.
    text_column: the column of texts in tables; None for the column `text`, or else for the only
        column that has texts.
    """

    max_length: int | None = _from_option("max_length")
    stride: int | None = _from_option("stride")
    store: Path | None = _from_option("store")
    precision: str = _from_option("precision", "fp32")
    text_column: str | None = _from_option("text_column")


@dataclass(frozen=True)
class SpeedSettings(_Checked):
    """Holds all settings of a speed measurement.

    texts: sentences; the first 20 are timed one by one. If it is empty, sentences of 32 random
    tokens are timed.
    """

    batch_size: int = _from_option("batch_size", 16)
    max_length: int = _from_option("max_length", 512)
    repeat: int = _from_option("repeat", 5)
    seed: int = _from_option("seed", 0)
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class SearchSettings(_Checked):
    """Holds all settings of a ranking of documents.

    documents_by: the model that embeds documents; None for the model that embeds queries.
    teacher: the model whose ranking is the reference for agreement.
    candidates, candidates_by: for rerank, the file or the model that gives the candidates.
    depth: number of candidates for each query.
    max_length: tokens at which texts are truncated; None for the limit in the model's folder.
    """

    documents_by: str | None = _from_option("documents_by")
    teacher: str | None = _from_option("teacher")
    candidates: Path | None = _from_option("candidates")
    candidates_by: str | None = _from_option("candidates_by")
    depth: int = _from_option("depth", 100)
    max_length: int | None = _from_option("max_length")

    def setup(self) -> str:
        """Describe, for printed tables, the model that embeds the documents, or the source of the
        candidates; "" if neither is set."""
        if self.documents_by:
            return f"documents by {self.documents_by}"
        first = self.candidates_by or self.candidates
        return f"of the {self.depth} best by {first}" if first else ""


KINDS = {
    "mlm": MlmSettings,
    "fine-tuning": FineTuneSettings,
    "lm": LmSettings,
    "speed": SpeedSettings,
    "rerank": SearchSettings,
}
"""The settings of each kind of task, by its name in --help."""
