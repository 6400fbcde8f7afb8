"""One store that a student learns from: its batches, its losses, its held-out part."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from store import FeatureStore
from student_train.data.batch import StudentBatch
from student_train.data.cache import source_of
from student_train.data.collator import Collator
from student_train.data.stream import chosen_blocks, loaded, split_blocks
from student_train.settings.options import TrainOptions
from student_train.settings.stages import stages_of
from student_train.train.distiller import Distiller
from student_train.train.evaluate import Measured, evaluate
from support.errors import UserError


class Lesson:
    """Aligns a store to the student by a collator of its own, with projections to its own widths.

    With several stores each step has a batch of each store, and the mean of their losses. Stores of
    the same windows give the same texts under the same masks. Their KL, over outcomes that all of
    them keep, then has the gradient of a single teacher: the mean of their distributions.
    """

    def __init__(
        self,
        store: FeatureStore,
        collator: Collator,
        student: PreTrainedModel,
        options: TrainOptions,
        device: torch.device,
    ) -> None:
        self.store = store
        self._whole = collator.reading(source_of(store, options.cache, device))
        width = store.features.width
        self.distiller = Distiller(student, options, store.features.hidden, width).to(device)
        self.device, self.stages = device, stages_of(options, self.distiller.layers)
        blocks, self._held_out = split_blocks(store, options.held_out)
        self._blocks = [chosen_blocks(store, blocks, stage) for stage in self.stages]

    def steps_of(self, number: int) -> int:
        """Count the optimiser steps of a stage."""
        options = self.stages[number]
        if options.steps:
            return options.steps
        assert options.epochs is not None  # resolved
        batches = self.store.batch_count(
            options.seed, 0, options.batch_tokens, blocks=self._blocks[number]
        )
        return max(1, round(options.epochs * batches / options.accumulate))

    def enter(self, number: int) -> None:
        """Begin a stage."""
        self._number, self.options = number, self.stages[number]
        self.distiller.options = self.options
        self._collator = self._whole.serving(self.options)

    def batches(self, first: int) -> Generator[StudentBatch]:
        """Stream the stage's batches without end, from number `first` on; close it afterwards."""
        return loaded(
            self.store,
            self._collator,
            self._blocks[self._number],
            self.options.workers,
            seed=self.options.seed,
            batch_tokens=self.options.batch_tokens,
            view=self.options.view,
            first=first,
            device=self.device,
        )

    def loss(self, batch: StudentBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the weighted sum of the stage's losses, and each of them.

        Raises UserError where no weight that moves has a part in them.
        """
        parts, _ = self._measured(batch)
        loss = torch.stack([self.options.loss[name] * part for name, part in parts.items()]).sum()
        if not loss.requires_grad:
            raise UserError(
                f"--freeze {','.join(self.options.freeze)}: nothing moves that the losses"
                f" {', '.join(parts)} depend on; choose other losses, or freeze less"
            )
        return loss, parts

    def _measured(self, batch: StudentBatch) -> Measured:
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"
        ):
            return self.distiller.measured(batch)

    def validate(self) -> dict[str, float]:
        """Measure the losses on the held-out part; see `evaluate`."""
        return evaluate(
            self.distiller,
            self.store,
            self._collator,
            self._held_out,
            self.options,
            self._measured,
        )
