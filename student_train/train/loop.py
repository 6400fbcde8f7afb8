"""The one training loop: store -> batches -> losses -> student."""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from store import FeatureStore
from student_train.data.batch import StudentBatch
from student_train.data.collator import Collator
from student_train.model.freezing import set_frozen
from student_train.output.board import Board
from student_train.settings.options import TrainOptions
from student_train.train.checkpoint import load_checkpoint, save_checkpoint
from student_train.train.lesson import Lesson
from support import files
from support.errors import UserError
from support.signals import stoppable
from training.optimizer import optimizer_of
from training.schedule import Schedule

BETAS = (0.9, 0.98)  # as DistilBERT was trained (Sanh et al. 2019)
METRICS = "metrics.jsonl"


@dataclass
class Trained:
    """A finished run: the student, its last validation and what it cost."""

    student: PreTrainedModel
    validation: dict[str, float]
    steps: int
    tokens: int
    seconds: float


def train(
    store: FeatureStore,
    student: PreTrainedModel,
    collator: Collator,
    options: TrainOptions,
    out: Path | None = None,
    *,
    others: Sequence[tuple[FeatureStore, Collator]] = (),
    resume: bool = False,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Trained:
    """Train `student` on `store` (or anything with its `stream`, `blocks`, `batch_count`,
    `features` and `meta`).

    `others` are learnt from as well, in each step a batch of each (see `Lesson`).

    With `out`, metrics and checkpoints are written there; `resume` goes on from the newest
    checkpoint, along the very same loss curve: batches, masks and dropout are functions of (seed,
    step). `on_step` is told the step and its losses, `say` where a resumed training begins. Raises
    Stopped after SIGINT or SIGTERM, saved at the step that was under way; UserError where the loss
    is no longer finite.
    """
    with (
        stoppable() as stop,
        closing(_Run([(store, collator), *others], student, options, out, resume, say)) as run,
        stop.held(),
        tqdm(
            total=run.steps, initial=run.step, desc="train", unit="step", disable=None
        ) as progress,
    ):
        for found in run.losses():
            progress.update()
            progress.set_postfix(loss=f"{found['loss']:.3f}", refresh=False)
            if on_step:
                on_step(run.step, found)
            run.record(found)
            if (run.step - run.first) % run.eval_every == 0 and run.step < run.last:
                run.validate()
            if out is not None and (stop.asked or run.step % run.checkpoint_every == 0):
                run.save()
            stop.check()
    return Trained(student, run.validation, run.step, run.tokens, run.seconds())


def _give_back() -> None:
    """Freed memory to the system: of blocks of ever other sizes glibc keeps gigabytes."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Run:
    """The state of one training, that a checkpoint holds, and the steps over it."""

    def __init__(
        self,
        stores: Sequence[tuple[FeatureStore, Collator]],
        student: PreTrainedModel,
        options: TrainOptions,
        out: Path | None,
        resume: bool,
        say: Callable[[str], object],
    ) -> None:
        self.out, self.say, self.seed = out, say, options.seed
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        self.lessons = [Lesson(*each, student, options, self.device) for each in stores]
        self.model = nn.ModuleList(lesson.distiller for lesson in self.lessons)
        self.stages = self.lessons[0].stages
        steps = [self.lessons[0].steps_of(number) for number in range(len(self.stages))]
        self.ends = np.cumsum(steps).tolist()
        self.steps = self.ends[-1]
        self.step = self.tokens = 0
        self.spent, self.begun = 0.0, time.perf_counter()
        self.validation: dict[str, float] = {}
        self.enter(0)
        if out is not None and resume:
            self.load()
        # What a killed run showed after its last checkpoint comes again.
        purge = self.step + 1 if resume else None
        self.board = Board(out / "tensorboard", purge) if out else None

    def enter(self, number: int) -> None:
        """Begin a stage: its losses, data and weights that move, with a new optimiser."""
        self.number, self.options = number, self.stages[number]
        self.first, self.last = [0, *self.ends][number], self.ends[number]
        steps = self.last - self.first
        for lesson in self.lessons:
            lesson.enter(number)
        set_frozen(self.model, self.options)
        self.eval_every = self.options.eval_every or max(1, steps // 10)
        self.checkpoint_every = self.options.checkpoint_every or self.eval_every
        self.optimizer = optimizer_of(
            self.model,
            self.options.optimizer,
            lr=self.options.resolved_lr,
            weight_decay=self.options.weight_decay,
            betas=BETAS,
            fused=True,
        )
        warmup = round(steps * self.options.warmup)
        self.schedule = Schedule(self.options.schedule, steps, warmup)
        self.best: dict[str, Any] | None = None

    def leave(self) -> None:
        """End a stage: validate, and go back to its best weights if that was asked for."""
        self.validation = self.validate()
        if self.best is not None:
            self.model.load_state_dict(self.best["weights"])
            self.validation = self.best["found"]
        if len(self.stages) > 1 and "valid_loss" in self.validation:
            self.say(
                f"stage     {self.number + 1} of {len(self.stages)} ends at step {self.step}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in self.validation.items())
            )

    def seconds(self) -> float:
        """Of training so far, those before a resume included."""
        return self.spent + time.perf_counter() - self.begun

    def losses(self) -> Iterator[dict[str, float]]:
        """Take the steps that are left; for each, its losses and its tokens."""
        yield from self._stage()
        self.leave()
        for number in range(self.number + 1, len(self.stages)):
            self.enter(number)
            yield from self._stage()
            self.leave()

    def _stage(self) -> Iterator[dict[str, float]]:
        options = self.options
        first = (self.step - self.first) * options.accumulate
        batches = [lesson.batches(first) for lesson in self.lessons]
        self.model.train()
        try:
            while self.step < self.last:
                self._seed()
                rate = options.resolved_lr * self.schedule.factor(self.step - self.first)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                tokens, found = self._accumulate(batches)
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
                if not math.isfinite(found["loss"]) or not math.isfinite(norm):
                    raise UserError(
                        f"step {self.step + 1}: training has diverged (loss {found['loss']:g}, its"
                        f" gradient's norm {float(norm):g}); lower --lr, here {rate:.2g}"
                    )
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.step += 1
                self.tokens += tokens
                yield {**found, "lr": rate, "tokens": tokens}
        finally:
            for each in batches:
                each.close()

    def _seed(self) -> None:
        """Dropout is a function of (seed, step), so that a resumed run draws the same."""
        sequence = np.random.SeedSequence([self.seed, self.step])
        torch.manual_seed(int(sequence.generate_state(1)[0]))

    def _accumulate(
        self, batches: Sequence[Generator[StudentBatch]]
    ) -> tuple[int, dict[str, float]]:
        """Add up the gradients of one optimiser step; its tokens and mean losses."""
        tokens, found = 0, dict[str, float]()
        shares = self.options.accumulate * len(self.lessons)
        for _ in range(self.options.accumulate):
            for lesson, some in zip(self.lessons, batches, strict=True):
                batch = next(some).to(self.device)
                tokens += batch.tokens
                loss, parts = lesson.loss(batch)
                (loss / shares).backward()
                for name, value in {**parts, "loss": loss}.items():
                    found[name] = found.get(name, 0.0) + float(value.detach()) / shares
        return tokens, found

    def validate(self) -> dict[str, float]:
        each = [lesson.validate() for lesson in self.lessons]
        found = dict(each[0])
        for number, values in enumerate(each[1:], 2):
            found |= {f"store{number}_{name}": value for name, value in values.items()}
        if "valid_loss" in found:
            found["valid_loss"] = sum(values["valid_loss"] for values in each) / len(each)
            self.schedule.validated(found["valid_loss"])
            best = self.best["found"]["valid_loss"] if self.best else math.inf
            if self.options.best and found["valid_loss"] < best:
                weights = copy.deepcopy(self.model.state_dict())
                self.best = {"found": found, "weights": weights}
        self.record(found)
        _give_back()
        return found

    def record(self, values: dict[str, float]) -> None:
        if self.out is None or self.board is None:
            return
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")
        self.board.add(values, self.step)

    def save(self) -> None:
        assert self.out is not None
        files.sync(self.out / METRICS)
        state = {
            "stage": self.number,
            "best": self.best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": vars(self.schedule),
            "tokens": self.tokens,
            "seconds": self.seconds(),
            "metrics": (self.out / METRICS).stat().st_size,
        }
        save_checkpoint(self.out / "checkpoints", self.step, state)

    def load(self) -> None:
        assert self.out is not None
        (state, torn), written = load_checkpoint(self.out / "checkpoints"), 0
        if state is not None:
            self.enter(state["stage"])
            self.best = state["best"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule = Schedule(**state["schedule"])
            self.step, written = state["step"], state["metrics"]
            self.tokens, self.spent = state["tokens"], state["seconds"]
        passed = f" ({', '.join(path.name for path in torn)} torn: passed over)" if torn else ""
        self.say(f"resume    after step {self.step}{passed}")
        metrics = self.out / METRICS
        if metrics.exists() and metrics.stat().st_size > written:
            os.truncate(metrics, written)  # what was written after that checkpoint comes again

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
