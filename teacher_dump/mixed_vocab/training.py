"""The training loop of stage I, and the checkpoint that a stopped one goes on from."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from support import files
from support.differences import differences
from support.errors import ANOTHER, UserError, first_line
from support.lease import Lease
from support.signals import Stop
from teacher_dump.mixed_vocab.model import MixedTeacher
from teacher_dump.mixed_vocab.segmentation import Batch, Mixer
from training.optimizer import optimizer_of

LINES = 20  # of losses, that a training prints
WARMUP = 0.05
WEIGHT_DECAY = 0.01
CLIP = 1.0
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Course:
    """How long and how fast to train. `begun` says what was begun: a checkpoint of another one is
    refused."""

    steps: int
    lr: float
    optimizer: str
    seed: int
    precision: str
    checkpoint_every: int
    begun: dict[str, Any]

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, ...: warm-up, then linear to 0."""
        warmup = round(WARMUP * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (self.steps - step) / max(1, self.steps - warmup)


def train(
    model: MixedTeacher,
    mixer: Mixer,
    course: Course,
    checkpoint: Path,
    device: str,
    stop: Stop,
    say: Callable[[str], object] = lambda line: None,
) -> np.ndarray:
    """Train in place and return the student's embeddings, float32 [Vs, d].

    Goes on from `checkpoint` if there is one, along the same curve. Raises UserError where that is
    of another training, or where the loss is no longer finite; Stopped, with a checkpoint written,
    after a signal.
    """
    model.to(device).train()
    optimizer = optimizer_of(
        model, course.optimizer, lr=course.lr, weight_decay=WEIGHT_DECAY, betas=BETAS
    )
    with closing(Lease(checkpoint)):  # two trainings would take each other's checkpoint for theirs
        step = _load(checkpoint, model, optimizer, course.begun)
        if step:
            say(f"resume    after step {step} of {course.steps}")
        bar = tqdm(
            total=course.steps, initial=step, unit="step", desc="mixed vocabulary", disable=None
        )
        meter = _Meter(course.steps)
        left = islice(mixer.batches(step), course.steps - step)
        with bar as progress, stop.held():
            for batch in left:
                found = _step(model, optimizer, batch.to(torch.device(device)), step, course)
                step += 1
                progress.update()
                for line in meter.lines(step, found):
                    progress.clear()
                    say(line)
                due = step % course.checkpoint_every == 0 or step == course.steps
                if stop.asked or due:
                    _save(checkpoint, step, model, optimizer, course.begun)
                stop.check()
    return model.student.weight.detach().float().cpu().numpy().copy()


def _step(
    model: MixedTeacher, optimizer: torch.optim.Optimizer, batch: Batch, step: int, course: Course
) -> np.ndarray:
    """One step of the optimiser; what `_Meter` adds up."""
    # Dropout is a function of (seed, step), so that a resumed training draws the same.
    torch.manual_seed(int(np.random.SeedSequence([course.seed, step]).generate_state(1)[0]))
    for group in optimizer.param_groups:
        group["lr"] = course.rate(step)
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=course.precision == "bf16"):
        sums = torch.stack(model(batch))
    loss = sums.sum() / max(1, len(batch.labels))
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    mean = float(loss.detach())
    if not (math.isfinite(mean) and math.isfinite(norm)):
        raise UserError(
            f"step {step + 1}: training has diverged (loss {mean:g}, its gradient's norm"
            f" {norm:g}); lower --lr, here {course.rate(step):.2g}"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    own = int(batch.labels_own.sum())
    counts = (len(batch.labels) - own, own, int(batch.present.sum()))
    return np.array([*sums.detach().float().cpu().numpy(), *counts])


class _Meter:
    """Mean losses since the line before."""

    def __init__(self, steps: int) -> None:
        self.steps, self.every = steps, max(1, steps // LINES)
        self.sums, self.begun = np.zeros(5), time.perf_counter()

    def lines(self, step: int, found: np.ndarray) -> Iterator[str]:
        self.sums += found
        if step % self.every and step != self.steps:
            return
        teacher, student, of_teacher, of_student, tokens = self.sums
        seconds = time.perf_counter() - self.begun
        yield (
            f"step {step}/{self.steps}  loss {(teacher + student) / (of_teacher + of_student):.4f}"
            f"  teacher's pieces {teacher / max(1, of_teacher):.4f}"
            f"  student's {student / max(1, of_student):.4f}  {tokens / seconds:,.0f} tokens/s"
        )
        self.sums, self.begun = np.zeros(5), time.perf_counter()


def _save(
    path: Path,
    step: int,
    model: MixedTeacher,
    optimizer: torch.optim.Optimizer,
    begun: dict[str, Any],
) -> None:
    buffer = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"begun": begun, "step": step, **state}, buffer)
    try:
        files.write(path, buffer.getbuffer())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {files.reason(error)}") from error


def _load(
    path: Path, model: MixedTeacher, optimizer: torch.optim.Optimizer, begun: dict[str, Any]
) -> int:
    """Steps that the checkpoint has behind it; 0 where there is none."""
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for what it cannot read
        raise UserError(
            f"{path}: the checkpoint of a stopped training cannot be read ({first_line(error)});"
            " remove it to begin anew"
        ) from error
    differ = [
        f"{key} was {old} and is {new}" for key, old, new in differences(state["begun"], begun)
    ]
    if differ:
        raise UserError(
            f"{path}: is of a training with other arguments: {'; '.join(differ)}; use the same"
            f" arguments to go on, or {ANOTHER}"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
