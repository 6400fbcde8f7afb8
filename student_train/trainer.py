"""The one training loop: store -> batches -> losses -> student."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from store import FeatureStore, disk
from store.errors import UserError
from store.stopping import stoppable
from student_train.batches import Collator, StudentBatch
from student_train.board import Board
from student_train.checkpoint import load_checkpoint, save_checkpoint
from student_train.data import loaded, split_blocks
from student_train.evaluate import evaluate
from student_train.options import TrainOptions
from student_train.schedule import Schedule
from student_train.student import Distiller

BETAS, EPSILON = (0.9, 0.98), 1e-6  # as DistilBERT was trained (Sanh et al. 2019)
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
    resume: bool = False,
    on_step: Callable[[int, dict[str, float]], object] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Trained:
    """Train `student` on `store` (or anything with its `stream`, `blocks`, `batch_count`,
    `features` and `meta`).

    With `out`, metrics and checkpoints are written there; `resume` goes on from the newest
    checkpoint, along the very same loss curve: batches, masks and dropout are functions of (seed,
    step). `on_step` is told the step and its losses, `say` where a resumed training begins. Raises
    Stopped after SIGINT or SIGTERM, saved at the step that was under way; UserError where the loss
    is no longer finite.
    """
    with (
        stoppable() as stop,
        closing(_Run(store, student, collator, options, out, resume, say)) as run,
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
            if run.step % run.eval_every == 0 and run.step < run.steps:
                run.validate()
            if out is not None and (stop.asked or run.step % run.checkpoint_every == 0):
                run.save()
            stop.check()
        validation = run.validate()
    return Trained(student, validation, run.step, run.tokens, run.seconds())


class _Run:
    """The state of one training, that a checkpoint holds, and the steps over it."""

    def __init__(
        self,
        store: FeatureStore,
        student: PreTrainedModel,
        collator: Collator,
        options: TrainOptions,
        out: Path | None,
        resume: bool,
        say: Callable[[str], object],
    ) -> None:
        self.store, self.collator, self.options, self.out = store, collator, options, out
        self.device = torch.device(options.device)
        torch.manual_seed(options.seed)
        self.distiller = Distiller(
            student, options, store.features.hidden, store.features.width
        ).to(self.device)
        self.train_blocks, self.valid_blocks = split_blocks(store, options.held_out)
        self.steps = options.steps or self._steps_of()
        self.eval_every = options.eval_every or max(1, self.steps // 10)
        self.checkpoint_every = options.checkpoint_every or self.eval_every
        self.optimizer = self._optimizer()
        self.schedule = Schedule(options.schedule, self.steps, round(self.steps * options.warmup))
        self.step = self.tokens = 0
        self.spent, self.begun = 0.0, time.perf_counter()
        if out is not None and resume:
            self.load(say)
        # What a killed run showed after its last checkpoint comes again.
        purge = self.step + 1 if resume else None
        self.board = Board(out / "tensorboard", purge) if out else None

    def _steps_of(self) -> int:
        assert self.options.epochs is not None  # resolved
        batches = self.store.batch_count(
            self.options.seed, 0, self.options.batch_tokens, blocks=self.train_blocks
        )
        return max(1, round(self.options.epochs * batches / self.options.accumulate))

    def _optimizer(self) -> torch.optim.AdamW:
        decayed = [p for p in self.distiller.parameters() if p.requires_grad and p.dim() > 1]
        plain = [p for p in self.distiller.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.options.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, lr=self.options.resolved_lr, betas=BETAS, eps=EPSILON, fused=True
        )

    def seconds(self) -> float:
        """Of training so far, those before a resume included."""
        return self.spent + time.perf_counter() - self.begun

    def losses(self) -> Iterator[dict[str, float]]:
        """Take the steps that are left; for each, its losses and its tokens."""
        options = self.options
        batches = loaded(
            self.store,
            self.collator,
            self.train_blocks,
            options.workers,
            seed=options.seed,
            batch_tokens=options.batch_tokens,
            view=options.view,
            first=self.step * options.accumulate,
        )
        self.distiller.train()
        try:
            while self.step < self.steps:
                self._seed()
                rate = options.resolved_lr * self.schedule.factor(self.step)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                tokens, found = self._accumulate(batches)
                norm = torch.nn.utils.clip_grad_norm_(self.distiller.parameters(), options.clip)
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
            batches.close()

    def _seed(self) -> None:
        """Dropout is a function of (seed, step), so that a resumed run draws the same."""
        sequence = np.random.SeedSequence([self.options.seed, self.step])
        torch.manual_seed(int(sequence.generate_state(1)[0]))

    def _accumulate(self, batches: Iterator[StudentBatch]) -> tuple[int, dict[str, float]]:
        """Add up the gradients of one optimiser step; its tokens and mean losses."""
        tokens, found = 0, dict[str, float]()
        for _ in range(self.options.accumulate):
            batch = next(batches).to(self.device)
            tokens += batch.tokens
            parts = self.forward(batch)
            loss = torch.stack([self.options.loss[k] * v for k, v in parts.items()]).sum()
            (loss / self.options.accumulate).backward()
            for name, value in {**parts, "loss": loss}.items():
                share = float(value.detach()) / self.options.accumulate
                found[name] = found.get(name, 0.0) + share
        return tokens, found

    def forward(self, batch: StudentBatch) -> dict[str, torch.Tensor]:
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"
        ):
            return self.distiller(batch)

    def validate(self) -> dict[str, float]:
        found = evaluate(
            self.distiller, self.store, self.collator, self.valid_blocks, self.options, self.forward
        )
        if "valid_loss" in found:
            self.schedule.validated(found["valid_loss"])
        self.record(found)
        return found

    def record(self, values: dict[str, float]) -> None:
        if self.out is None or self.board is None:
            return
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")
        self.board.add(values, self.step)

    def save(self) -> None:
        assert self.out is not None
        disk.sync(self.out / METRICS)
        state = {
            "distiller": self.distiller.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": vars(self.schedule),
            "tokens": self.tokens,
            "seconds": self.seconds(),
            "metrics": (self.out / METRICS).stat().st_size,
        }
        save_checkpoint(self.out / "checkpoints", self.step, state)

    def load(self, say: Callable[[str], object]) -> None:
        assert self.out is not None
        (state, torn), written = load_checkpoint(self.out / "checkpoints"), 0
        if state is not None:
            self.distiller.load_state_dict(state["distiller"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule = Schedule(**state["schedule"])
            self.step, written = state["step"], state["metrics"]
            self.tokens, self.spent = state["tokens"], state["seconds"]
        passed = f" ({', '.join(path.name for path in torn)} torn: passed over)" if torn else ""
        say(f"resume    after step {self.step}{passed}")
        metrics = self.out / METRICS
        if metrics.exists() and metrics.stat().st_size > written:
            os.truncate(metrics, written)  # what was written after that checkpoint comes again

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
