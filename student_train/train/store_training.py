"""Train a student on one store: its batches, its distiller, its validation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import chain

import torch
from transformers import PreTrainedModel

from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.blocks import describe_masks
from teachonce.student_train.data.cache import feature_source
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.data.combined_teachers import combine_teachers
from teachonce.student_train.data.stream import BatchOrder, prepared_batches
from teachonce.student_train.model.any_student import check_fits
from teachonce.student_train.plan.train_plan import StoreSplit, TrainPlan
from teachonce.student_train.settings.options import BatchPlan
from teachonce.student_train.train.distiller import Distiller
from teachonce.student_train.train.evaluate import evaluate_batches, held_out
from teachonce.training.ranks import ALONE, Ranks


class StoreTraining:
    """Trains and validates a student on one store, with projections to the teacher's hidden size.

    sources: the store, and other stores of the same text, each with its collator. Their batches
        have the same texts and masks, and `combine_teachers` makes one teacher of them.
    ranks: the processes that share the texts of a batch.

    Stores of different text have a `StoreTraining` each. A step then takes a batch of each, and the
    mean of their losses.
    """

    def __init__(
        self,
        plan: TrainPlan,
        student: PreTrainedModel,
        sources: Sequence[tuple[StoreSplit, Collator]],
        ranks: Ranks = ALONE,
    ) -> None:
        for _, collator in sources:
            check_fits(student, len(collator.student_tokenizer), collator.max_length)
        self.plan, self.device = plan, torch.device(plan.options.device)
        self._source = sources[0][0]
        self.store = self._source.store
        self._read = [
            (s.store, c.reading(feature_source(s.store, plan.options.cache, self.device)))
            for s, c in sources
        ]
        bf16 = plan.options.precision == "bf16"
        distiller = Distiller.of(student, plan.options, self.store, bf16=bf16, ranks=ranks)
        self.distiller = distiller.to(self.device)

    def steps_of(self, number: int) -> int:
        """Return the number of optimizer steps of a stage, from `--steps` or `--epochs`."""
        options = self.plan.stages[number].options
        if options.steps is not None:
            return options.steps
        assert options.epochs is not None  # resolved
        return self.steps_in(number, options.epochs)

    def steps_in(self, number: int, epochs: float = 1.0) -> int:
        """Count the optimizer steps of `epochs` epochs of a stage, each as long as the stage's
        first epoch.

        An epoch of a balanced stage is one pass over its labelled or its unlabelled text, whichever
        is larger.
        """
        accumulate = self.plan.stages[number].options.accumulate
        return max(1, round(epochs * self._batches_of(number) / accumulate))

    def _batches_of(self, number: int) -> int:
        stage = self.plan.stages[number]
        return max(
            self.store.batch_count(
                stage.options.seed, 0, **batch.options.batching, blocks=self._source.blocks(batch)
            )
            for batch in stage.batches
        )

    def describe_masks(self, steps: int) -> str:
        """Describe which masked views the stage reads in N steps; see `blocks.describe_masks`."""
        options = self.stage.options
        epochs = options.epochs
        if options.steps or epochs is None:
            epochs = steps * options.accumulate / self._batches_of(self._number)
        return describe_masks(self.store.features, options.view, epochs)

    def enter(self, number: int) -> None:
        """Start a stage."""
        self._number, self.stage = number, self.plan.stages[number]

    def batches(self, first: int, every: int = 1) -> Generator[StudentBatch]:
        """Stream the stage's batches without end, alternating between its batch plans. Close the
        stream afterwards.

        first: number of the first batch. every: yield every `every`-th batch.
        """
        streams = [self._batches(batch, first, every) for batch in self.stage.batches]
        return streams[0] if len(streams) == 1 else _joined(streams, list)

    def _batches(self, batch: BatchPlan, first: int, every: int) -> Generator[StudentBatch]:
        streams = [
            prepared_batches(
                BatchOrder(
                    store,
                    collator.serving(batch),
                    self._source.blocks(batch),
                    seed=self.stage.options.seed,
                    view=batch.options.view,
                    batching=batch.options.batching,
                    first=first,
                    every=every,
                ),
                self.plan.options.workers,
                self.device,
            )
            for store, collator in self._read
        ]
        if len(streams) == 1:
            return streams[0]
        return _joined(streams, lambda batches: [self._combined(batches)])

    def _combined(self, batches: Sequence[StudentBatch]) -> StudentBatch:
        return combine_teachers(
            [batch.to(self.device) for batch in batches], self.store.features.vocabulary
        )

    def validate(self) -> dict[str, float]:
        """Measure the losses on the held-out blocks; see `evaluate`."""
        blocks, plan = self._source.held_out, self.stage.validation
        iters = [
            held_out(store, collator.serving(plan), blocks, plan)
            for store, collator in (self._read if len(blocks) else ())
        ]
        batches = map(self._combined, zip(*iters, strict=True)) if len(iters) > 1 else chain(*iters)
        return evaluate_batches(self.distiller, batches, plan)


def _joined(
    streams: Sequence[Generator[StudentBatch]],
    join: Callable[[tuple[StudentBatch, ...]], list[StudentBatch]],
) -> Generator[StudentBatch]:
    """Yield the batches that `join` makes of one batch of each stream; close the streams at the
    end."""
    try:
        for batches in zip(*streams, strict=True):
            yield from join(batches)
    # Each stream has a thread or processes of its own, which end when it is closed.
    finally:
        for stream in streams:
            stream.close()
