"""Adds the student's vocabulary to a teacher (Zhao et al. 2021, stage I), and trains its embeddings
on the loop of `teachonce.training.loop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from teachonce.support import files
from teachonce.support.arrays import Array, Floats
from teachonce.support.differences import differences
from teachonce.support.errors import ANOTHER, UserError
from teachonce.support.lease import Lease
from teachonce.support.signals import Stop
from teachonce.teacher_dump.mixed_vocab.options import MixedVocabOptions, check_width
from teachonce.teacher_dump.mixed_vocab.segmentation import MixedBatch, Mixer
from teachonce.teacher_dump.teacher.teacher import Teacher
from teachonce.training.checkpoint import fitting, read_checkpoint, write_checkpoint
from teachonce.training.loop import Losses, Training
from teachonce.training.optimizer import Schedule, optimizer_of
from teachonce.training.ranks import ALONE, Ranks

LINES = 20  # lines of losses that a training prints
# As in BERT's pre-training (Devlin et al. 2019, A.2), whose code clips gradients at 1.
WEIGHT_DECAY = 0.01
CLIP = 1.0
BETAS = (0.9, 0.999)


class MixedTeacher(nn.Module):
    """Reads and predicts, as a masked LM, pieces of its own vocabulary and of a student's.

    The input embedding of a student's piece with embedding e [d] is x = W e + c, with W [D, d] and
    c [D], where D is the teacher's embedding size. The teacher's head gives a state h [D]. Each
    vocabulary has its own softmax: the teacher's decoder for the teacher's pieces, and the logits
    h · (W e_i) + b_i for the student's pieces, with the same e and W. The logits omit h · c, which
    is equal for all pieces and changes no probability. So the softmax equals a softmax of h over
    the projected embeddings x_i, and of Wᵀh over the embeddings e_i.

    `same` int64 [teacher's pieces] ties the pieces that both vocabularies have: the student's id
    of each teacher's piece, or -1. The projected embedding of a tied piece replaces the teacher's
    input embedding, and its output embedding if the teacher ties the two (Zhao et al. 2021,
    section 6).

    Raises UserError if the student's hidden size exceeds the teacher's embedding size, and if the
    input of the teacher's head has another size than its embeddings.
    """

    same: torch.Tensor

    def __init__(
        self, teacher: Teacher, pieces: int, width: int, seed: int, same: Array | None = None
    ) -> None:
        super().__init__()
        assert teacher.decoder is not None  # loaded with --head mlm
        self.network: Any = teacher.model
        embeddings: Any = self.network.get_input_embeddings()
        hidden = embeddings.weight.shape[1]
        check_width(width, hidden, teacher.name)
        if teacher.decoder.weight.shape[1] != hidden:
            raise UserError(
                f"{teacher.name}: the input of its masked-LM head has size"
                f" {teacher.decoder.weight.shape[1]}, but its embeddings have size {hidden}, so one"
                " projection cannot serve both; choose a teacher with tied embeddings, such as BERT"
            )
        # `Decoder.of` copies no float32 weight, so tied ones still share their memory.
        tied = teacher.decoder.weight.data_ptr() == embeddings.weight.data_ptr()
        self.weight = embeddings.weight if tied else nn.Parameter(teacher.decoder.weight.clone())
        self.bias = nn.Parameter(teacher.decoder.bias.clone())
        self.student, self.up = nn.Embedding(pieces, width), nn.Linear(width, hidden)
        self.student_bias = nn.Parameter(torch.zeros(pieces))
        ids = torch.full((len(embeddings.weight),), -1)
        if same is not None:
            ids[: len(same)] = torch.from_numpy(same.astype("int64"))
        # Not in checkpoints: it follows from the two tokenizers.
        self.register_buffer("same", ids, persistent=False)
        self._one_output = tied and same is not None
        start = self._start if same is None else self._start_tied
        start(embeddings.weight.detach(), seed)

    @torch.no_grad()
    def _start(self, embeddings: torch.Tensor, seed: int) -> None:
        """Initialise embeddings at random; the projected embeddings get the mean and standard
        deviation of `embeddings`."""
        chance = torch.Generator().manual_seed(seed)
        width = self.student.weight.shape[1]
        mean = embeddings.mean(0)
        self.student.weight.normal_(0, float((embeddings - mean).std()), generator=chance)
        # A sum of `width` products then has the standard deviation of the embeddings.
        self.up.weight.normal_(0, width**-0.5, generator=chance)
        self.up.bias.copy_(mean)

    @torch.no_grad()
    def _start_tied(self, embeddings: torch.Tensor, seed: int) -> None:
        """Initialise tied pieces from the principal components of the teacher's embeddings. The
        other pieces are drawn at random with the same standard deviations."""
        # Zhao et al. do not describe this start: principal components approximate the teacher's
        # embeddings best.
        rows, ids = self._tied()
        shared = embeddings[rows]
        mean = shared.mean(0)
        # `eigh` sorts eigenvalues ascending; its [D,D] matrix is smaller than the rows of an SVD.
        _, directions = torch.linalg.eigh((shared - mean).T @ (shared - mean))
        main = directions.flip(1)[:, : self.student.weight.shape[1]]
        narrow = (shared - mean) @ main
        chance = torch.Generator().manual_seed(seed)
        self.student.weight.normal_(generator=chance).mul_(narrow.std(0))
        self.student.weight[ids] = narrow
        self.up.weight.copy_(main)
        self.up.bias.copy_(mean)

    def _tied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's and the student's ids of tied pieces."""
        rows = (self.same >= 0).nonzero().flatten()
        return rows, self.same[rows]

    def _embedded(self, batch: MixedBatch) -> torch.Tensor:
        """Return input embeddings [B,L,D] of pieces of both vocabularies."""
        # 0 in place of the student's ids, which the teacher's table may lack; replaced below.
        ids = batch.ids.masked_fill(batch.own, 0)
        embeddings: torch.Tensor = self.network.get_input_embeddings()(ids)
        same = self.same[ids]
        projected = batch.own | (same >= 0)
        student_ids = torch.where(batch.own, batch.ids, same)[projected]
        # Under autocast the projection gives bfloat16, but both tensors must have one dtype.
        return embeddings.masked_scatter(
            projected[..., None], self.up(self.student(student_ids)).to(embeddings.dtype)
        )

    def _outputs(self) -> torch.Tensor:
        """Return the teacher's output embeddings [V,D]."""
        if not self._one_output:
            return self.weight
        rows, ids = self._tied()
        return self.weight.index_copy(0, rows, self.up(self.student(ids)).to(self.weight.dtype))

    def forward(self, batch: MixedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropies, in nats, of masked teacher's and student's pieces."""
        embeddings = self._embedded(batch)
        states = self.network(inputs_embeds=embeddings, attention_mask=batch.present.long()).logits
        states = states.flatten(0, 1)[batch.rows]
        own = batch.labels_own
        logits = functional.linear(states[~own], self._outputs(), self.bias)
        # Down to the student's width: projecting all embeddings up would take more multiplications.
        narrow = functional.linear(states[own], self.up.weight.T)
        own_logits = functional.linear(narrow, self.student.weight, self.student_bias)
        return _summed(logits, batch.labels[~own]), _summed(own_logits, batch.labels[own])


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def train_embeddings(
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
    options exists, the training continues from it, with the losses of an uninterrupted one.
    `started` identifies the training. Raises UserError if the checkpoint belongs to another
    training, and if the loss is not finite. After a signal it writes a checkpoint and raises
    Stopped.
    """
    model.to(options.dump.device).train()
    training = _EmbeddingTraining(model, mixer, options, started, say, ranks)
    # Without the lease, two trainings could write one checkpoint.
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
            numbers = [number for number in range(count) if ranks.owns(self.step * count + number)]
            # A generator: the batches of a step are not on the device all at once.
            numbered = ((number, next(batches).to(self.device)) for number in numbers)
            yield self.update(rate, numbered, self._losses, count)

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
