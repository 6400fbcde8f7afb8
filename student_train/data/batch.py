"""The batch of a training step: tokens as the student reads them, and the teacher's targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teachonce.student_train.data.encoded import Encoded
from teachonce.student_train.data.pooling import MapPooling, Runs
from teachonce.student_train.data.targets import TaskTargets
from teachonce.student_train.losses.logits import LogitTargets, SharedTargets
from teachonce.support.arrays import Array


@dataclass(frozen=True)
class Inputs:
    """Holds padded student input: ids [B,S], where there is a token [B,S], and of pairs of texts
    which one it is of [B,S], 0 or 1 as the student's tokenizer tells."""

    ids: Tensor
    present: Tensor
    types: Tensor | None = None

    @classmethod
    def of(cls, ids: Array, start: Array, padding: int, types: Array | None = None) -> Inputs:
        """Pad flat ids [N], and types [N], of sequences that begin at `start` [B+1]."""
        lengths = np.diff(start)
        present = np.arange(lengths.max()) < lengths[:, None]
        padded = np.full(present.shape, padding, np.int64)
        padded[present] = ids
        kinds = None
        if types is not None:
            kinds = torch.zeros(present.shape, dtype=torch.int64)
            kinds[torch.from_numpy(present)] = torch.from_numpy(types.astype(np.int64))
        return cls(torch.from_numpy(padded), torch.from_numpy(present), kinds)

    def split(self, texts: int) -> list[Inputs]:
        """Split the batch into parts of so many texts; the last may have fewer."""
        ids, present = self.ids.split(texts), self.present.split(texts)
        kinds = [None] * len(ids) if self.types is None else self.types.split(texts)
        return [Inputs(*part) for part in zip(ids, present, kinds, strict=True)]


@dataclass(frozen=True)
class Distillation:
    """Holds the teacher's targets for G runs of one alignment, of the student's flat tokens.

    Targets that no loss of this alignment reads are empty. States and maps are empty until
    `StudentBatch.to`, too.
    """

    inputs: Inputs | None  # a second input (reduce); None: the runs are of the masked native input
    runs: Runs
    logit_runs: Runs | None  # the runs that have logit targets
    logits: LogitTargets | None
    shared: SharedTargets | None
    map_pooling: MapPooling | None
    task: TaskTargets | None
    encoded: Encoded | None  # the five below before they are decoded; None afterwards
    # float32 [G,D] by name: pooled states, normalised per channel
    normalised: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)  # [G,D] by name: pooled raw states
    # float32 [B,D] by name: normalised state of the first token
    sentences: dict[str, Tensor] = field(default_factory=dict)
    raw_sentences: dict[str, Tensor] = field(default_factory=dict)  # [B,D]: that state as it is
    maps: dict[str, Tensor] = field(default_factory=dict)  # [B,G',G'] by name: between runs

    def decoded(self) -> Distillation:
        """Decode the teacher's states and maps where they are, if that was not done already."""
        if self.encoded is None:
            return self
        return replace(self, encoded=None, **self.encoded.decoded())


@dataclass(frozen=True)
class StudentBatch:
    """Holds the data of one step. `masked` are the flat token numbers of `labels`, `characters`
    counts the characters under them, `tokens` the student's own tokens. `aligned` has what the
    teacher teaches, by the name of each alignment that a loss asks for, `vectors` [B,W] its vectors
    of the texts."""

    inputs: Inputs
    masked: Tensor  # int64 [M]
    labels: Tensor  # int64 [M]
    characters: int
    tokens: int
    aligned: dict[str, Distillation]
    vectors: Tensor | None = None

    @property
    def distillation(self) -> Distillation | None:
        """Return what the teacher teaches to losses of one alignment; None where it teaches
        nothing."""
        found = list(self.aligned.values())
        if len(found) > 1:
            raise ValueError(f"the batch is aligned in several ways: {', '.join(self.aligned)}")
        return found[0] if found else None

    @property
    def of_task(self) -> str | None:
        """Name the first alignment that has targets of a task; None where there are none."""
        return next((name for name, each in self.aligned.items() if each.task is not None), None)

    def masked_lm(self) -> dict[str, Tensor]:
        """Return the batch as models of transformers and their Trainer take it, for the masked-LM
        loss alone: `input_ids`, `attention_mask` and `labels` int64 [B,S], -100 where nothing is
        asked, and of pairs `token_type_ids`."""
        present = self.inputs.present
        asked = torch.full((int(present.sum()),), -100, device=self.labels.device)
        asked[self.masked] = self.labels
        labels = torch.full(present.shape, -100, device=asked.device)
        labels[present] = asked
        found = {
            "input_ids": self.inputs.ids,
            "attention_mask": present.long(),
            "labels": labels,
        }
        return found if self.inputs.types is None else found | {"token_type_ids": self.inputs.types}

    def to(self, device: torch.device) -> StudentBatch:
        """Move the batch to a device, and decode the teacher's states and maps there."""
        moved: StudentBatch = _moved(self, device)
        return replace(moved, aligned={n: taught.decoded() for n, taught in moved.aligned.items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            value = value.pin_memory()  # only then does the copy not keep this thread waiting
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{key: _moved(item, device) for key, item in vars(value).items()})
    return value
