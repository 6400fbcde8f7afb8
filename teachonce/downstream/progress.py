"""Prints the progress of a transformers Trainer: a line per evaluation, bars on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback

from teachonce.support.console import counted
from teachonce.training.loop import pace

COUNTED = "non_padding"
"""The value of `include_num_input_tokens_seen` that `TrainingProgress` needs for tokens/s."""

QUIET = 30.0
"""Seconds without a line, after which a pipe gets one."""


class ReplacingPrinter(TrainerCallback):
    """Replaces the Trainer's own printer, which prints dictionaries."""

    def follow(self, trainer: Trainer) -> None:
        """Replace the printer of a Trainer by this callback."""
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)


class TrainingProgress(ReplacingPrinter):
    """Prints steps and epochs before the first step. At every evaluation, prints the step, the
    training loss, `measures`, the speed and the time left.

    Between evaluations, a terminal shows a bar; to a pipe, a line with step, speed and time left is
    printed twice a minute.

    say: prints a line.
    measures: keys of the Trainer's metrics, by the headings under which they are printed.
    prefix: the start of each line, such as "seed 0, ".
    unit: the word for an example, such as "text" or "block".
    """

    def __init__(
        self,
        say: Callable[[str], object],
        measures: Mapping[str, str],
        prefix: str = "",
        unit: str = "text",
    ) -> None:
        self.say, self.measures, self.prefix, self.unit = say, measures, prefix, unit
        self.bar: Any = None
        self.started, self.printed = 0.0, 0.0
        self.before, self.first, self.evaluated = 0, 0, 0
        self.losses = dict[int, float]()
        """Losses logged since the last evaluation, by step."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        if train_dataloader is not None:
            self.say(f"{self.prefix}{self._work(args, state, train_dataloader)}")
        self.started = self.printed = time.perf_counter()
        # The printed speed is of this run only, but the totals of a resumed training include the
        # tokens and steps before its checkpoint.
        self.before = int(state.num_input_tokens_seen)
        self.first = self.evaluated = int(state.global_step)
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="train",
            unit="step",
            disable=None,
        )

    def _work(self, args: Any, state: Any, batches: Any) -> str:
        """Describe the numbers of steps, epochs and texts of a training."""
        accumulate, unit = args.gradient_accumulation_steps, self.unit
        epochs = state.max_steps / max(1, math.ceil(len(batches) / accumulate))
        steps = counted(state.max_steps, "step")
        size = f"{args.train_batch_size * args.world_size} x {accumulate}"
        texts = counted(len(batches.dataset), unit)
        return f"{steps} of {size} {unit}s: {epochs:.3g} epoch{'s' * (epochs != 1)} of {texts}"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        speed, remaining = self._pace(state)
        self.bar.set_postfix_str(speed, refresh=False)  # tqdm shows the time left itself
        self.bar.update(1)
        if self.bar.disable and time.perf_counter() - self.printed >= QUIET:
            self._print(state, f"{speed}, {remaining}", "; ")

    def _pace(self, state: Any) -> tuple[str, str]:
        tokens = state.num_input_tokens_seen - self.before
        steps, remaining = state.global_step - self.first, state.max_steps - state.global_step
        return pace(tokens, time.perf_counter() - self.started, steps, remaining)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.losses[state.global_step] = float(logs["loss"])

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        if self.bar is None:  # not in training
            return
        figures = [f"loss {self._mean_loss():.4f}"] if self.losses else []
        figures += [f"{name} {metrics[key]:.4f}" for name, key in self.measures.items()]
        # Otherwise this line would be printed into the line of the bar.
        with tqdm.external_write_mode():
            self._print(state, f"{', '.join(figures)}; {', '.join(self._pace(state))}", ": ")

    def _print(self, state: Any, text: str, after: str) -> None:
        self.say(f"{self.prefix}step {state.global_step:,}/{state.max_steps:,}{after}{text}")
        self.printed = time.perf_counter()

    def _mean_loss(self) -> float:
        """Return the mean training loss over the steps since the last evaluation."""
        first, total = self.evaluated, 0.0
        for step, loss in self.losses.items():  # a mean over the steps since the previous one
            total += loss * (step - self.evaluated)
            self.evaluated = step
        self.losses.clear()
        return total / (self.evaluated - first)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
        self.bar = None


class Scoring(ReplacingPrinter):
    """Shows a bar, with the label `name`, over the batches of an evaluation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bar: Any = None

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if self.bar is None:
            self.bar = tqdm(total=len(eval_dataloader), desc=self.name, unit="batch", disable=None)
        self.bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
