"""Trains a student: the loop over its stages, with validation, metrics and checkpoints."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from teachonce.checkpoints.sentence_folder import VectorHead
from teachonce.store import FeatureStore
from teachonce.student_train.data.batch import StudentBatch
from teachonce.student_train.data.collator import Collator
from teachonce.student_train.losses.loss import Term
from teachonce.student_train.model.any_student import student_size
from teachonce.student_train.model.freezing import set_frozen
from teachonce.student_train.plan.train_plan import TrainPlan, check_arguments, plan_of
from teachonce.student_train.settings.option_fields import describe_changed_settings
from teachonce.student_train.settings.options import TrainOptions
from teachonce.student_train.train.evaluate import (
    check_held_out,
    check_validation,
    warning_of_constant_states,
)
from teachonce.student_train.train.store_training import StoreTraining
from teachonce.student_train.train.training_log import (
    METRICS,
    TrainingLog,
    cut_metrics,
)
from teachonce.support import files
from teachonce.support.environment import warn_of_spinning
from teachonce.support.errors import UserError
from teachonce.support.parsing import local_path
from teachonce.support.redaction import redacted
from teachonce.support.signals import stoppable
from teachonce.training.checkpoint import (
    fitting,
    has_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from teachonce.training.loop import Losses, Training, pace, release_memory
from teachonce.training.optimizer import Schedule, optimizer_of
from teachonce.training.ranks import ALONE, Ranks

BETAS = (0.9, 0.98)  # as DistilBERT was trained (Sanh et al. 2019)
CHECKPOINTS = "checkpoints"  # in the folder of a training
UNSAVED = 600.0  # most seconds between checkpoints if --checkpoint-every is not given
WORSE = 2.0  # factor of the loss before the first step; first batches differ by less
# The attention of these kinds fills masked scores with the smallest number of another precision.
FLOAT32_ONLY = ("deberta",)


@dataclass
class Trained:
    """Holds a finished training: the student, its last validation and its cost."""

    student: PreTrainedModel
    validation: dict[str, float]
    steps: int
    tokens: int
    seconds: float
    vector_head: VectorHead | None = None  # if the student is trained on text vectors


@dataclass(frozen=True)
class Callbacks:
    """Holds functions that a training calls. An exception in one of them ends the training, without
    a checkpoint.

    on_step: receives each step and its losses.
    on_validation: receives the step and figures of each validation.
    say: receives lines for the user; with `say_progress` also one line at each validation.
    """

    on_step: Callable[[int, dict[str, float]], object] | None = None
    on_validation: Callable[[int, dict[str, float]], object] | None = None
    say: Callable[[str], object] = lambda line: None
    say_progress: bool = False


def train(
    store: FeatureStore,
    student: PreTrainedModel,
    collator: Collator,
    options: TrainOptions,
    out: str | Path | None = None,
    *,
    others: Sequence[tuple[FeatureStore, Collator]] = (),
    resume: bool = False,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
    on_validation: Callable[[int, dict[str, float]], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
    say_progress: bool = False,
) -> Trained:
    """Resolve `options`, and train `student` on `store` and on `others`; see `train_plan`, and
    `Callbacks` for the functions that are called.

    `store` may be any object with `stream`, `blocks`, `batch_count`, `features` and `meta` of a
    store. Raises UserError for `resume` without `out`, for `resume` with other settings, and,
    without `resume`, if `out` has checkpoints of an earlier training; and if `out` is a URL.
    """
    stores = [store, *(other for other, _ in others)]
    check_arguments("train", options, *stores)
    if resume and out is None:
        raise UserError("train: resume=True needs out, the folder of the training to continue")
    folder = None if out is None else local_path(out)
    # A new training would remove its own checkpoints: the latest steps remain in the folder.
    if folder is not None and not resume and has_checkpoints(folder / CHECKPOINTS):
        raise UserError(
            f"{folder}: has checkpoints of an earlier training,"
            f" {newest_checkpoint(folder / CHECKPOINTS)}; continue it with resume=True, remove"
            " them, or give another out"
        )
    plan = plan_of(options.resolved(), *stores, layers=student_size(student)[1])
    collators = [collator, *(c for _, c in others)]
    if line := check_held_out(plan, collators):
        say(line)
    callbacks = Callbacks(on_step, on_validation, say, say_progress)
    return train_plan(plan, student, collators, folder, resume=resume, callbacks=callbacks)


def train_plan(
    plan: TrainPlan,
    student: PreTrainedModel,
    collators: Sequence[Collator],
    out: Path | None = None,
    *,
    resume: bool = False,
    callbacks: Callbacks = Callbacks(),
    ranks: Ranks = ALONE,
) -> Trained:
    """Train `student` by a plan. Each store has one of the `collators`.

    Each step reads a batch of every store, and takes the mean of their losses, or combines the
    batches into one (see `StoreTraining`).

    out: the folder of metrics and checkpoints, if given.
    resume: continue from the newest checkpoint, with the result of an uninterrupted training:
        batches, masks and dropout are functions of (seed, step).
    ranks: several processes, each with its share of a step's batches; if a step has fewer batches
        than processes, each with its share of the texts of each batch. The first process writes.
        The losses differ from a single process's only in the last bits; if texts are shared,
        dropout masks differ, too.

    Raises Stopped after SIGINT or SIGTERM, with a checkpoint at the current step, and UserError if
    the loss or its gradient is not finite.
    """
    options = plan.options
    if student.config.model_type in FLOAT32_ONLY and options.precision == "bf16":
        raise UserError(
            f"a student of type {student.config.model_type} cannot be trained in bf16, which its"
            " attention does not support: use precision fp32"
        )
    if options.device == "cpu":
        warn_of_spinning(torch.get_num_threads())
    with (
        stoppable() as stop,
        closing(
            _StudentTraining(plan, student, collators, out, resume, callbacks, ranks)
        ) as training,
    ):
        training.run(stop, "train")
        training.finished = True
    head = training.trainings[0].distiller.vector_head
    return Trained(
        *(student, training.validation, training.step, training.tokens, training.seconds()), head
    )


Taken = tuple[StoreTraining, tuple[Term, ...], StudentBatch]
"""A store's training, the terms of a batch, and the batch."""


class _StudentTraining(Training):
    """Trains a student, stage by stage, on one or more stores."""

    finished = False

    def __init__(
        self,
        plan: TrainPlan,
        student: PreTrainedModel,
        collators: Sequence[Collator],
        out: Path | None,
        resume: bool,
        callbacks: Callbacks,
        ranks: Ranks,
    ) -> None:
        options = plan.options
        self.settings = json.dumps(redacted(options.describing()))
        self.out, self.callbacks, self.say = out, callbacks, callbacks.say
        self.device = torch.device(options.device)
        # Seeded here, because the projections are drawn next.
        torch.manual_seed(options.seed)
        sources = list(zip(plan.sources, collators, strict=True))
        groups = [sources] if options.combine == "outputs" else [[source] for source in sources]
        # Processes share the batches of a step if there is one for each, else the texts of a batch.
        shared = ranks.size > options.accumulate
        self.readers, self.copies = (ALONE, ranks.size) if shared else (ranks, 1)
        text_ranks = ranks if shared else ALONE
        self.trainings = [StoreTraining(plan, student, group, text_ranks) for group in groups]
        # A student has one vector for a text, whatever store the text is of.
        for training in self.trainings[1:]:
            training.distiller.share_vector_head(self.trainings[0].distiller)
        model = nn.ModuleList(training.distiller for training in self.trainings)
        super().__init__(model, options.seed, options.clip, ranks)
        self.stages = plan.stages
        self.lengths = [self.trainings[0].steps_of(number) for number in range(len(self.stages))]
        self.steps = sum(self.lengths)
        self.tokens = self.read = 0
        self.spent, self.started = 0.0, time.perf_counter()
        self.saved = self.started  # time of the last checkpoint of this process
        self.validation: dict[str, float] = {}
        self.judged_at = -1  # step of the last validation
        self.enter(0, 0)
        if out is not None and resume:
            self.load(out)
        self.tokens_before, self.first_step = self.tokens, self.step  # of this process
        self.log: TrainingLog | None = None  # of the first process
        if out and ranks.is_main:
            self.log = TrainingLog(out, options, self.say, self.step if resume else None)

    def enter(self, number: int, first: int) -> None:
        """Start a stage at step `first`, with its losses, data, trained weights and a new
        optimizer."""
        self.number, self.options = number, self.stages[number].options
        steps = self.lengths[number]
        self.first, self.last = first, first + steps
        self.steps = first + sum(self.lengths[number:])
        for training in self.trainings:
            training.enter(number)
        set_frozen(self.model, self.options)
        interval = self.options.eval_every or max(1, steps // 10)
        self.eval_every = self.trainings[0].steps_in(number) if interval == "epoch" else interval
        self.optimizer = optimizer_of(
            self.model,
            self.options.optimizer,
            lr=self.options.resolved_lr,
            weight_decay=self.options.weight_decay,
            betas=BETAS,
            # On one thread a fused step of 128x2x2 takes 2 to 6 ms, torch's default 35 to 48 ms.
            fused=True,
        )
        self.schedule = self.options.schedule_over(steps)
        self.best: dict[str, Any] | None = None
        self.first_loss = math.inf  # of the stage; unknown after a resume
        self.judged_in_stage = False

    def leave(self) -> None:
        """End a stage: validate, and restore its best weights with `--best`."""
        if self.judged_at != self.step:
            self.validate()
        if self.best is not None:
            self.model.load_state_dict(self.best["weights"])
            self.validation = self.best["found"]
        if len(self.stages) > 1 and "valid_loss" in self.validation:
            self.say(
                f"stage     {self.number + 1} of {len(self.stages)} ends at step {self.step}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in self.validation.items())
            )

    def seconds(self) -> float:
        """Return the seconds of the training so far, including the time before a resume."""
        return self.spent + time.perf_counter() - self.started

    def updates(self) -> Iterator[Losses]:
        yield from self._stage()
        self.leave()
        for number in range(self.number + 1, len(self.stages)):
            self.enter(number, self.step)
            yield from self._stage()
            self.leave()

    def _stage(self) -> Iterator[Losses]:
        options = self.options
        for line in dict.fromkeys(
            training.describe_masks(self.last - self.first) for training in self.trainings
        ):
            if line:
                self.say(f"masks     {line}")
        first = self.readers.first_from((self.step - self.first) * options.accumulate)
        streams = [training.batches(first, self.readers.size) for training in self.trainings]
        self.model.train()
        # Processes that share texts each compute the whole loss (see `Ranks.gather`). The losses of
        # a balanced stage are added, not averaged (Mukherjee & Awadallah 2019, equation 8).
        count = options.accumulate * len(self.trainings) * self.copies
        try:
            while self.step < self.last and not self.schedule.is_over:
                rate = options.resolved_lr * self.schedule.factor(self.step - self.first)
                self.read = 0
                losses = self.update(rate, self._owned(streams), self._losses, count)
                tokens = int(self.ranks.summed({"tokens": self.read})["tokens"]) // self.copies
                self.tokens += tokens
                yield {**losses, "lr": rate, "tokens": tokens}
        finally:
            for stream in streams:
                stream.close()

    def _owned(self, streams: Sequence[Generator[StudentBatch]]) -> Iterator[tuple[int, Taken]]:
        """Yield the batches of a step that this process computes, each with its number."""
        count = self.options.accumulate
        done = (self.step - self.first) * count  # batches of the stage
        numbers = itertools.count()
        for batch in range(done, done + count):
            for training, stream in zip(self.trainings, streams, strict=True):
                for plan, number in zip(training.stage.batches, numbers, strict=False):
                    # Batches of other processes are numbered, too: the number seeds the dropout.
                    if self.readers.owns(batch):
                        yield number, (training, plan.terms, next(stream).to(self.device))

    def _losses(self, taken: Taken) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the weighted sum of a batch's losses, and each loss.

        In a balanced stage, the sums of the two batches are added. Raises UserError if the losses
        do not depend on a trained weight.
        """
        training, terms, batch = taken
        self.read += batch.tokens
        parts = training.distiller.compute(batch, terms).losses
        loss = training.distiller.weighted(parts, terms)
        if not loss.requires_grad:
            # `Loss` refuses other constants than 0.
            frozen, remedy = "", "compute it from the student's side, also where its value is 0"
            if self.options.freeze:
                frozen = f" with --freeze {','.join(self.options.freeze)}"
                remedy = "freeze less"
            raise UserError(
                f"--loss {','.join(parts)}: depends on no trained weight{frozen}; choose another"
                f" loss, or {remedy}"
            )
        return loss, parts

    def after(self, losses: Losses, progress: Any) -> None:
        progress.total = self.steps  # fewer steps after a stage that ended early
        speed, _ = self._pace()  # the bar itself shows the remaining time
        if self.step == self.first + 1:
            self.first_loss = losses["loss"]
        valid = self.validation.get("valid_loss")
        judged = "" if valid is None else f", valid={valid:.3f}"
        progress.set_postfix_str(f"loss={losses['loss']:.3f}{judged}, {speed}", refresh=False)
        if self.callbacks.on_step:
            self.callbacks.on_step(self.step, losses)
        self.record(losses)
        # The last step of a stage is validated by `leave`.
        if (self.step - self.first) % self.eval_every == 0 and self.step < self.last:
            self.validate()
            # Without a terminal: a line now and then instead of a bar.
            if self.callbacks.say_progress and progress.disable:
                self.say(self._line(losses))

    def _pace(self) -> tuple[str, str]:
        seconds = time.perf_counter() - self.started
        steps = self.step - self.first_step  # of this process, like tokens and seconds
        read, remaining = self.tokens - self.tokens_before, self.steps - self.step
        return pace(read, seconds, steps, remaining, "student tokens")

    def _line(self, losses: Losses) -> str:
        """Return a progress line with losses, speed and remaining time."""
        figures = f"loss {losses['loss']:.4g}"
        if "valid_loss" in self.validation:
            figures += f", valid_loss {self.validation['valid_loss']:.4g}"
        return f"step      {self.step:,} of {self.steps:,}: {figures}; {', '.join(self._pace())}"

    def is_due(self) -> bool:
        if self.options.checkpoint_every is not None:
            return self.step % self.options.checkpoint_every == 0
        # Also by time: in a slow training hours may lie between two validations.
        late = time.perf_counter() - self.saved >= UNSAVED
        return late or self.step % self.eval_every == 0

    def validate(self) -> None:
        """Compute the held-out losses, pass them to the schedule, and store the best weights."""
        # One process validates for all processes, whose schedules and best weights must not differ
        # in the last bits.
        results = [training.validate() for training in self.trainings] if self.ranks.is_main else []
        results = self.ranks.broadcast(results)
        figures = dict(results[0])
        for number, values in enumerate(results[1:], 2):
            figures |= {f"store{number}_{name}": value for name, value in values.items()}
        # The figures that a schedule or a sweep judges by count all stores.
        for name in ("valid_loss", "valid_spearman"):
            if all(name in values for values in results):
                figures[name] = sum(values[name] for values in results) / len(results)
            else:
                figures.pop(name, None)
        if "valid_loss" in figures:
            check_validation(figures, self.step)
            self.schedule.validated(figures["valid_loss"])
            best = self.best["found"]["valid_loss"] if self.best else math.inf
            if self.options.best and figures["valid_loss"] < best:
                # A copy, as the next step changes the tensors of a state dict in place.
                self.best = {"found": figures, "weights": copy.deepcopy(self.model.state_dict())}
        # States of a training that diverges are constant, too, and only a lower rate helps.
        constant = warning_of_constant_states(figures, self.options)
        if line := self._warning_of_divergence(figures) or constant:
            self.say(line)
        self.record(figures)
        self.validation, self.judged_at, self.judged_in_stage = figures, self.step, True
        release_memory()
        # Called last, when the figures are logged: a sweep's callback may raise to stop the
        # training.
        if self.callbacks.on_validation:
            self.callbacks.on_validation(self.step, figures)

    def _warning_of_divergence(self, figures: Mapping[str, float]) -> str:
        """Return a warning if the student is much worse than before its first step, at two
        validations or at the end, else ""."""
        # A high rate may overshoot in the warm-up, and recover.
        if self.step < self.steps and not self.judged_in_stage:
            return ""
        validations = (figures, self.validation if self.step < self.steps else figures)
        if any(f.get("valid_loss", 0.0) <= WORSE * self.first_loss for f in validations):
            return ""
        return (
            f"warning   step {self.step:,}: valid_loss {figures['valid_loss']:.4g} is far above the"
            f" loss before the first step, {self.first_loss:.4g}: the training diverges; lower --lr"
            f" ({self.options.resolved_lr:g})"
        )

    def record(self, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.add(values, self.step)

    def save(self) -> None:
        if self.out is None:
            return
        # Synced before the checkpoint, which stores how many of these bytes are valid: a resumed
        # training cuts the file to them.
        files.sync(self.out / METRICS)
        state = {
            **self.state(),
            "settings": self.settings,
            "stage": self.number,
            "first": self.first,
            # Only if it is of this step: a resumed training takes it for the validation of this
            # step.
            "validation": self.validation if self.judged_at == self.step else None,
            "best": self.best,
            "schedule": vars(self.schedule),
            "tokens": self.tokens,
            "seconds": self.seconds(),
            "metrics": (self.out / METRICS).stat().st_size,
        }
        save_checkpoint(self.out / CHECKPOINTS, self.step, state)
        self.saved = time.perf_counter()

    def load(self, out: Path) -> None:
        """Continue from the newest checkpoint in `out`, if there is one."""
        (state, torn), written = load_checkpoint(out / CHECKPOINTS), 0
        if state is not None:
            with fitting(out / CHECKPOINTS):
                then, now = json.loads(state["settings"]), json.loads(self.settings)
                changed = describe_changed_settings(then, now)
            if changed:
                raise UserError(
                    f"{out}: cannot resume with other settings: {changed}; give the earlier"
                    " settings, or another out"
                )
            with fitting(out / CHECKPOINTS):
                # The stage is entered first: its optimizer has the groups of weights of the saved
                # state. Its first step is read, because the stage before it may have ended early.
                self.enter(int(state["stage"]), int(state["first"]))
                self.restore(state)
                self.best = state["best"]
                self.schedule = Schedule(**state["schedule"])
                if state.get("validation") is not None:
                    self.validation, self.judged_at = state["validation"], self.step
                self.tokens, self.spent = int(state["tokens"]), float(state["seconds"])
                written = int(state["metrics"])
        self.ranks.any(False)  # a barrier: all processes have read the checkpoint
        passed = f" ({', '.join(path.name for path in torn)} incomplete: skipped)" if torn else ""
        nothing = f"no checkpoint in {out / CHECKPOINTS}: starts from the beginning"
        self.say(f"resume    {nothing if state is None else f'after step {self.step}'}{passed}")
        if self.ranks.is_main and not cut_metrics(out, written):
            self.say(f"metrics   {out / METRICS} lacks lines from before step {self.step + 1}")

    def close(self) -> None:
        if self.log is not None:
            self.log.close(self.finished)
