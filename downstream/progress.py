"""What a person sees of a Trainer's work: a line for each evaluation, and a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback


class Progress(TrainerCallback):
    """Says step, training loss and `measures` (what to call each metric of the Trainer) whenever
    training is evaluated."""

    def __init__(
        self, say: Callable[[str], object], measures: Mapping[str, str], what: str = ""
    ) -> None:
        self.say, self.measures, self.what = say, measures, what
        self.bar: Any = None
        self.loss: float | None = None

    def follow(self, trainer: Trainer) -> None:
        """In place of the Trainer's own way, which prints dictionaries."""
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="train",
            unit="step",
            disable=None,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        if self.bar is None:  # not in training
            return
        told = [] if self.loss is None else [f"loss {float(self.loss):.4f}"]
        told += [f"{name} {metrics[key]:.4f}" for name, key in self.measures.items()]
        with tqdm.external_write_mode():
            self.say(
                f"{self.what}step {state.global_step:,}/{state.max_steps:,}: {', '.join(told)}"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
        self.bar = None


class Minutes(TrainerCallback):
    """Minutes since this was made, and those before the checkpoint that a training resumes from:
    every row of the log tells them, and checkpoints keep the log."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()

    def spent(self) -> float:
        return (time.perf_counter() - self.begun) / 60

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.log_history:
            self.begun -= 60 * state.log_history[-1].get("minutes", 0)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history[-1]["minutes"] = self.spent()
