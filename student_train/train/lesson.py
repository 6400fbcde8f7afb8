"""One store that a student learns from: its batches, its losses, its held-out part."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedModel

from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import chosen_blocks, split_blocks, told_of_masks
from teachonce.student_train.data.cache import source_of
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.joined import joined
from teachonce.student_train.data.stream import loaded
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.settings.stages import stages_of
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import Measured, evaluate_batches, held_out
from teachonce.support.arrays import Array
from teachonce.support.errors import UserError


class Lesson:
    """Aligns a store to the student by a collator of its own, with projections to its own widths.

    `others` are stores of the same text: their teachers and the store's are one, see `joined`.

    With several lessons each step has a batch of each, and the mean of their losses. Stores of
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
        others: Sequence[tuple[FeatureStore, Collator]] = (),
    ) -> None:
        self.store = store
        self._whole = [
            (each, one.reading(source_of(each, options.cache, device)))
            for each, one in ((store, collator), *others)
        ]
        self.distiller = Distiller.of(student, options, store).to(device)
        self.device, self.stages = device, stages_of(options, self.distiller.layers)
        blocks, self._held_out = split_blocks(store, options.held_out)
        self._blocks = [
            [chosen_blocks(store, blocks, share) for share in stage.shares()]
            for stage in self.stages
        ]

    def steps_of(self, number: int) -> int:
        """Count the optimiser steps of a stage."""
        options = self.stages[number]
        if options.steps is not None:
            return options.steps
        assert options.epochs is not None  # resolved
        return self.steps_in(number, options.epochs)

    def steps_in(self, number: int, epochs: float = 1.0) -> int:
        """Count the optimiser steps of so many epochs of a stage, each as long as its first.

        An epoch of a balanced stage passes once over the kind of text of which there is more.
        """
        return max(1, round(epochs * self._batches_of(number) / self.stages[number].accumulate))

    def _batches_of(self, number: int) -> int:
        options = self.stages[number]
        return max(
            self.store.batch_count(options.seed, 0, **options.batching, blocks=blocks)
            for blocks in self._blocks[number]
        )

    def told_of_masks(self, steps: int) -> str:
        """Tell which masked views the stage reads in so many steps; see `stream.told_of_masks`."""
        epochs = self.options.epochs
        if self.options.steps or epochs is None:
            epochs = steps * self.options.accumulate / self._batches_of(self._number)
        return told_of_masks(self.store.features, self.options.view, epochs)

    def enter(self, number: int) -> None:
        """Begin a stage."""
        self._number, self.options = number, self.stages[number]
        self.shares = self.options.shares()

    def _serving(self, options: TrainOptions) -> list[tuple[FeatureStore, Collator]]:
        return [(store, one.serving(options)) for store, one in self._whole]

    def batches(self, first: int, every: int = 1) -> Generator[StudentBatch]:
        """Stream the stage's batches without end, from number `first` on, one of `every`, of its
        `shares` in turn; close it afterwards."""
        each = zip(self.shares, self._blocks[self._number], strict=True)
        streams = [self._batches(share, blocks, first, every) for share, blocks in each]
        return streams[0] if len(streams) == 1 else _in_turn(streams)

    def _batches(
        self, share: TrainOptions, blocks: Array, first: int, every: int
    ) -> Generator[StudentBatch]:
        streams = [
            loaded(
                store,
                collator,
                blocks,
                share.workers,
                seed=share.seed,
                **share.batching,
                sampling=share.sampling,
                view=share.view,
                first=first,
                every=every,
                device=self.device,
            )
            for store, collator in self._serving(share)
        ]
        return streams[0] if len(streams) == 1 else self._joined(streams)

    def _joined(self, streams: Sequence[Generator[StudentBatch]]) -> Generator[StudentBatch]:
        with closing(_together(streams)) as together:
            for batches in together:
                yield self._as_one(batches)

    def _as_one(self, batches: Sequence[StudentBatch]) -> StudentBatch:
        return joined([each.to(self.device) for each in batches], self.store.features.vocabulary)

    def loss(
        self, batch: StudentBatch, share: TrainOptions | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the weighted sum of the losses of a share, else of the stage, and each of them.

        Raises UserError where no weight that moves has a part in them.
        """
        self.distiller.options = share = share or self.options
        parts, _ = self._measured(batch)
        loss = self.distiller.weighted(parts)
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
        blocks = self._held_out
        self.distiller.options = self.options
        each = [
            held_out(store, collator, blocks, self.options)
            for store, collator in (self._serving(self.options) if len(blocks) else ())
        ]
        batches = map(self._as_one, zip(*each, strict=True)) if len(each) > 1 else chain(*each)
        return evaluate_batches(self.distiller, batches, self.options, self._measured)


def _in_turn(streams: Sequence[Generator[StudentBatch]]) -> Generator[StudentBatch]:
    with closing(_together(streams)) as together:
        for batches in together:
            yield from batches


def _together(
    streams: Sequence[Generator[StudentBatch]],
) -> Generator[tuple[StudentBatch, ...]]:
    """Take a batch of each stream at a time; close them in the end."""
    try:
        yield from zip(*streams, strict=True)
    finally:
        for each in streams:
            each.close()
