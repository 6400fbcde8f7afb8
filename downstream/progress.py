"""Shows how a transformers Trainer gets on: a line for each evaluation, bars on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback


class Progress(TrainerCallback):
    """Says step, training loss and `measures` at every evaluation during training.

    say: is called with each line.
    measures: metrics of the Trainer by what to call them.
    what: begins each line, such as "seed 0, ".
    """

    def __init__(
        self, say: Callable[[str], object], measures: Mapping[str, str], what: str = ""
    ) -> None:
        self.say, self.measures, self.what = say, measures, what
        self.bar: Any = None
        self.loss: float | None = None

    def follow(self, trainer: Trainer) -> None:
        """Replace the Trainer's own callback, which prints dictionaries."""
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


class Scoring(TrainerCallback):
    """Shows a bar over the batches of an evaluation; `what` names it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.bar: Any = None

    def follow(self, trainer: Trainer) -> None:
        """Replace the Trainer's own callback, which prints dictionaries."""
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if self.bar is None:
            self.bar = tqdm(total=len(eval_dataloader), desc=self.what, unit="batch", disable=None)
        self.bar.update(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
