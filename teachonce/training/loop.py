"""The one training loop: steps, dropout seeded by (seed, step), detection of divergence,
checkpoints and stopping.

A training is a subclass of `Training`: it defines the batches of a step, and what happens between
two steps.
"""

from __future__ import annotations

import ctypes
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from teachonce.support.environment import variable
from teachonce.support.errors import UserError
from teachonce.support.signals import Stop
from teachonce.training.ranks import ALONE, Ranks

CAPACITY, PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16"
EVERY = 5  # steps between two calls of `release_memory`
Losses = dict[str, float]
"""The losses of one step by name, each averaged over its batches; `loss` is the one minimised."""


B = TypeVar("B")
TOO_LARGE = (
    "values of the training data or of the initial weights are too large; leave out the loss that"
    " is not finite, or make the data or the weights again"
)


def nonfinite_parts(losses: Losses) -> str:
    """Return the parts of a loss that are not finite, each followed by a comma."""
    bad = (name for name, value in losses.items() if not math.isfinite(value))
    return "".join(f"{name} {losses[name]:g}, " for name in bad if not name.endswith("loss"))


def pace(
    tokens: int, seconds: float, done: int, left: int, unit: str = "tokens"
) -> tuple[str, str]:
    """Format the tokens per second of a training, and the time for its `left` remaining steps.

    done: steps taken in `seconds`. unit: the word for tokens, such as "student tokens".
    """
    remaining = tqdm.format_interval(left * seconds / max(1, done))
    return f"{tokens / seconds:,.0f} {unit}/s", f"{remaining} left"


@contextmanager
def limit_primitive_cache() -> Iterator[None]:
    """Limit oneDNN's cache to 16 compiled primitives instead of 1,024, unless its environment
    variable is set."""
    # Batches have many shapes, each with primitives of its own of about a megabyte. oneDNN reads
    # the variable when it compiles the first one. 40 steps of `tiny` take 1.10 to 1.14 GB with 16,
    # 1.18 to 1.21 GB with 64, and the same time.
    with variable(CAPACITY, os.environ.get(CAPACITY, PRIMITIVES)):
        yield


def release_memory() -> None:
    """Return freed memory to the operating system."""
    # With blocks of varying sizes, glibc retains gigabytes of freed memory.
    # A training of 128x2x2 held 2.3 GB and used 0.7; trimmed every 20 steps, it held 1.1 GB.
    # Mapping large blocks instead (M_MMAP_THRESHOLD) held 1.5 GB, and a step took 1.5 times as long
    # (RESULTS, "Soak").
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Training(ABC):
    """Holds a training: a model, its optimizer and the number of steps taken.

    `steps` is the number of all steps. A subclass sets `steps`, `optimizer` and, after a resume,
    `step`.
    """

    steps: int
    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, seed: int, clip: float, ranks: Ranks = ALONE) -> None:
        self.model, self.seed, self.clip, self.ranks = model, seed, clip, ranks
        self.step = 0

    @abstractmethod
    def updates(self) -> Iterator[Losses]:
        """Take the remaining steps with `update`; yield the losses of each step."""

    @abstractmethod
    def after(self, losses: Losses, progress: Any) -> None:
        """Log the last step, and validate. progress: the bar of tqdm."""

    @abstractmethod
    def is_due(self) -> bool:
        """Return whether a checkpoint is due at this step."""

    @abstractmethod
    def save(self) -> None:
        """Write a checkpoint."""

    def run(self, stop: Stop, name: str) -> None:
        """Train to the last step, with a progress bar called `name`.

        Raises UserError if the training diverges; Stopped after a signal, when the current step has
        ended and is saved.
        """
        with (
            limit_primitive_cache(),
            stop.deferred(),
            tqdm(
                total=self.steps,
                initial=self.step,
                unit="step",
                desc=name,
                # With None, tqdm shows no bar if stderr is not a terminal.
                disable=None if self.ranks.is_main else True,
            ) as progress,
        ):
            for losses in self.updates():
                progress.update()
                self.after(losses, progress)
                if self.step % EVERY == 0:
                    release_memory()
                # All processes stop at the same step, or the others would wait for gradients.
                stopping = self.ranks.any(stop.requested)
                if self.ranks.is_main and (stopping or self.is_due()):
                    self.save()
                if stopping:
                    # Also in a process that has received no signal itself.
                    stop.request()
                    stop.check()

    def update(
        self,
        rate: float,
        batches: Iterable[tuple[int, B]],
        losses: Callable[[B], tuple[Tensor, Mapping[str, Tensor]]],
        count: int = 1,
    ) -> Losses:
        """Take one step with the gradient of the mean loss of `count` batches.

        rate: learning rate. batches: this process's batches, each with its number in the step.
        losses: returns the loss of a batch, and further values to average, by name. count: number
        of the step's batches in all processes.

        Returns the means. Raises UserError if the loss or the gradient's norm is not finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        means = Losses()
        for number, batch in batches:
            self._seed_dropout(number)
            loss, parts = losses(batch)
            # A backward pass for each batch, so that only one batch has its graph in memory.
            (loss / count).backward()
            for name, value in {**parts, "loss": loss}.items():
                means[name] = means.get(name, 0.0) + float(value.detach()) / count
        means = self.ranks.summed(means)
        self.ranks.sum_gradients(self.model)
        # After the sum, so that every process divides by the norm of the whole gradient.
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
        # Before the optimizer's step, which would spread NaN to the weights.
        if not math.isfinite(means["loss"]) or not math.isfinite(norm):
            why, remedy = "training has diverged", f"lower --lr (now {rate:.2g})"
            if self.step == 0:  # no rate is too high before the first update
                why, remedy = "training cannot start", TOO_LARGE
            raise UserError(
                f"step {self.step + 1}: {why} ({nonfinite_parts(means)}loss {means['loss']:g}, its"
                f" gradient's norm {norm:g}); {remedy}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return means

    def _seed_dropout(self, number: int) -> None:
        """Seed the dropout of a batch by (seed, step, number in the step)."""
        # So a resumed training, or one of more processes, draws the same.
        seed = int(np.random.SeedSequence([self.seed, self.step, number]).generate_state(1)[0])
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # for each backend that is not in use, the call above formats the whole stack
            torch.default_generator.manual_seed(seed)

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: step, state dicts of model and optimizer."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.step = int(state["step"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
