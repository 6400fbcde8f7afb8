"""Trains the student's embeddings within the teacher, on the loop of `teachonce.training.loop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from teachonce.support import files
from teachonce.support.arrays import Floats
from teachonce.support.differences import differences
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.lease import Lease
from teachonce.support.signals import Stop
from teachonce.teacher_dump.mixed_vocab.mixed_teacher import MixedTeacher
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions
from teachonce.teacher_dump.mixed_vocab.segmentation import MixedBatch, Mixer
from teachonce.training.checkpoint import fitting, read_checkpoint, write_checkpoint
from teachonce.training.loop import Losses, Training
from teachonce.training.optimizer import optimizer_of
from teachonce.training.ranks import ALONE, Ranks
from teachonce.training.schedule import Schedule

LINES = 20  # lines of losses that a training prints
# As in BERT's pre-training (Devlin et al. 2019, A.2), whose code clips gradients at 1.
WEIGHT_DECAY = 0.01
CLIP = 1.0
BETAS = (0.9, 0.999)


def train(
    model: MixedTeacher,
    mixer: Mixer,
    options: MixedVocabOptions,
    started: dict[str, Any],
    stop: Stop,
    say: Callable[[str], object] = lambda line: None,
    ranks: Ranks = ALONE,
) -> Floats:
    """Train `model` in place and return the student's embeddings, float32 [Vs, d].

    Each rank computes its share of a step's batches; rank 0 writes. If the checkpoint of the
    options exists, the training continues from it, with the same losses as without a stop.
    `started` identifies the training. Raises UserError if the checkpoint belongs to another
    training, and if the loss is not finite. After a signal it writes a checkpoint and raises
    Stopped.
    """
    model.to(options.dump.device).train()
    training = _EmbeddingTraining(model, mixer, options, started, say, ranks)
    # Two trainings would write one checkpoint.
    with closing(Lease(options.checkpoint())) if ranks.is_main else nullcontext():
        training.load()
        training.run(stop, "mixed vocabulary")
    # A copy: on a CPU, NumPy would share the memory of the parameter.
    embeddings: Floats = model.student.weight.detach().float().cpu().numpy().copy()
    return embeddings


class _EmbeddingTraining(Training):
    """Trains a `MixedTeacher`, prints mean losses, and writes its checkpoint to one file."""

    model: MixedTeacher

    def __init__(
        self,
        model: MixedTeacher,
        mixer: Mixer,
        options: MixedVocabOptions,
        started: dict[str, Any],
        say: Callable[[str], object],
        ranks: Ranks,
    ) -> None:
        super().__init__(model, options.dump.seed, CLIP, ranks)
        self.mixer, self.options, self.started, self.say = mixer, options, started, say
        self.checkpoint, self.device = options.checkpoint(), torch.device(options.dump.device)
        self.steps = options.steps
        self.schedule = Schedule("linear", self.steps, round(options.warmup * self.steps))
        self.optimizer = optimizer_of(
            model, options.optimizer, lr=options.lr, weight_decay=WEIGHT_DECAY, betas=BETAS
        )
        self.sums, self.since = Losses(), time.perf_counter()

    def updates(self) -> Iterator[Losses]:
        self.since = time.perf_counter()
        count, ranks = self.options.accumulate, self.ranks
        batches = self.mixer.batches(ranks.first_from(self.step * count), ranks.size)
        while self.step < self.steps:
            rate = self.options.lr * self.schedule.factor(self.step)
            own = [number for number in range(count) if ranks.owns(self.step * count + number)]
            # A generator: the batches of a step are not on the device all at once.
            some = ((number, next(batches).to(self.device)) for number in own)
            yield self.update(rate, some, self._losses, count)

    def _losses(self, batch: MixedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss of a batch, and the sums and counts from which lines are
        printed."""
        narrow = self.options.dump.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=narrow):
            sums = torch.stack(self.model(batch))
        own = batch.labels_own.sum()
        parts = {
            "teacher": sums[0],
            "student": sums[1],
            "teacher_pieces": len(batch.labels) - own,
            "student_pieces": own,
            "tokens": batch.present.sum(),
        }
        return sums.sum() / max(1, len(batch.labels)), parts

    def after(self, losses: Losses, progress: Any) -> None:
        for name, value in losses.items():
            value *= self.options.accumulate  # a sum over the step's batches, as the counts are
            self.sums[name] = self.sums.get(name, 0.0) + value
        if self.step % max(1, self.steps // LINES) == 0 or self.step == self.steps:
            progress.clear()
            self.say(self._line())
            self.sums, self.since = Losses(), time.perf_counter()

    def _line(self) -> str:
        """Return a line with the mean losses since the last line, in nats."""
        sums, seconds = self.sums, time.perf_counter() - self.since
        nats = sums["teacher"] + sums["student"]
        pieces = sums["teacher_pieces"] + sums["student_pieces"]
        return (
            f"step {self.step}/{self.steps}  loss {nats / pieces:.4f}"
            f"  teacher's pieces {sums['teacher'] / max(1, sums['teacher_pieces']):.4f}"
            f"  student's {sums['student'] / max(1, sums['student_pieces']):.4f}"
            f"  {sums['tokens'] / seconds:,.0f} tokens/s"
        )

    def is_due(self) -> bool:
        return self.step % self.options.checkpoint_every == 0 or self.step == self.steps

    def save(self) -> None:
        try:
            write_checkpoint(self.checkpoint, {**self.state(), "begun": self.started})
        except OSError as error:
            raise UserError(
                f"{self.checkpoint}: cannot be written: {files.reason(error)}"
            ) from error

    def load(self) -> None:
        """Continue from the checkpoint, if it exists."""
        if self.ranks.broadcast(self.checkpoint.exists()):
            self._restore()
        self.ranks.any(False)  # a barrier: rank 0 may overwrite it once all ranks have read it

    def _restore(self) -> None:
        state = read_checkpoint(self.checkpoint)
        if state is None:
            raise UserError(
                f"{self.checkpoint}: the checkpoint of a stopped training cannot be read (damaged,"
                " or written by another version); remove it to start from the beginning"
            )
        with fitting(self.checkpoint):
            differ = [
                f"{key} was {old} and is {new}"
                for key, old, new in differences({**state["begun"]}, self.started)
            ]
        if differ:
            raise UserError(
                f"{self.checkpoint}: belongs to a training with other arguments:"
                f" {'; '.join(differ)}; use the same arguments to continue, or {ANOTHER}"
            )
        with fitting(self.checkpoint):
            self.restore(state)
        if self.step:
            self.say(f"resume    after step {self.step} of {self.steps}")
